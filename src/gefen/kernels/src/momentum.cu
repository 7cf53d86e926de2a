// Advances a quantised momentum and writes its dense direction.

#include "blocks.cuh"

struct Dense : Quantised<Dense> {
    static constexpr bool READS = false;

    __device__ static void write(const Walk<Dense>& walk, const Place& place, const Split& split,
                                 float (&entry)[WIDTH], const Packed& packed, const Packed&) {
        const Task& task = walk.task;
        float grad[WIDTH], top[WIDTH];
        walk.spread(&Outcome::top, split, top);
        packed.unpack(task.grad.kind, grad);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            entry[j] *= top[j];
            if (task.flags & NESTEROV) entry[j] = mixed(entry[j], grad[j], task.mix);
        }
        store(task.param, place, entry);
    }
};

extern "C" __launch_bounds__(THREADS, 3) __global__ void momentum(const void* table,
                                                               long long items) {
    Dense::run(table, items);
}
