// Shows that kernels run on a device and that tables reach them.

#include "platform.cuh"

// table: one pointer to long long [items]. Item i becomes i * i.
extern "C" __launch_bounds__(THREADS) __global__ void probe(const void* table, long long items) {
    long long* out = *static_cast<long long* const*>(table);
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < items;
         i += gridDim.x * (long long)THREADS) {
        out[i] = i * i;
    }
}
