// Advances a quantised momentum and writes its dense direction.

#include "blocks.cuh"

struct Dense : Quantised<Dense> {
    static constexpr bool READS = false;

    __device__ static Outcome settle(const Task&, const Moments& old, const Peak& peak,
                                     Moments& fresh) {
        fresh = {__uint_as_float(peak.top), 0.0f};
        return {old.magnitude, fresh.magnitude, 0.0f};
    }

    template <class Outcomes>
    __device__ static void write(const Task& task, const Place& place, float (&entry)[WIDTH],
                                 const Packed& packed, const Packed&, const Outcomes& outcomes) {
        float grad[WIDTH];
        packed.unpack(task.grad.kind, grad);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            entry[j] *= outcomes.at(j).top;
            if (task.flags & NESTEROV) entry[j] = mixed(entry[j], grad[j], task.mix);
        }
        store(task.param, place, entry);
    }
};

extern "C" __launch_bounds__(THREADS, 3) __global__ void momentum(const void* table, long long items) {
    Dense::run(table, items);
}
