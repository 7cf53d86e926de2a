// Advances a quantised momentum and writes its dense direction.

#include "quantised.cuh"

struct Dense : Quantised<Dense> {
    static constexpr bool READS = false;
    static constexpr float Outcome::*FIELD = &Outcome::top;

    __device__ static void write(const Task& task, const Place& place, float (&entry)[WIDTH],
                                 const float (&top)[WIDTH], const Packed&) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) entry[j] *= top[j];
        if (task.flags & NESTEROV) {
            Packed packed;
            float grad[WIDTH];
            packed.load(task.grad, place);  // again, from a cache
            packed.unpack(task.grad.kind, grad);
            mix(entry, grad, task.mix, entry);
        }
        store(task.param, place, entry);
    }
};

extern "C" __launch_bounds__(THREADS, RESIDENT) __global__ void momentum(const void* table,
                                                                      long long items) {
    Dense::run(table, items);
}
