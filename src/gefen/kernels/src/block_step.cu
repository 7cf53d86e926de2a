// Steps parameters whose second moment is shared by blocks.

#include "quantised.cuh"

struct Block : Quantised<Block> {
    static constexpr bool READS = true;
    static constexpr float Outcome::*FIELD = &Outcome::step;

    __device__ static Outcome settle(const Task& task, const Moments& old, const Peak& peak,
                                     Moments& fresh) {
        fresh = {__uint_as_float(peak.top), fmaf(peak.total, task.share, old.v * task.beta2)};
        const float below = sqrtf(fresh.v) / task.root2 + task.eps;
        return {old.magnitude, fresh.magnitude, fresh.magnitude * task.rate / below, 0.0f};
    }

    __device__ static void write(const Task& task, const Place& place, float (&entry)[WIDTH],
                                 const float (&step)[WIDTH], const Packed& packed) {
        float param[WIDTH];
        packed.unpack(task.param.kind, param);
        decay(task, param);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            param[j] = fmaf(-entry[j], step[j], param[j]);
        }
        store(task.param, place, param);
    }
};

extern "C" __launch_bounds__(THREADS, RESIDENT) __global__ void block_step(const void* table,
                                                                        long long items) {
    Block::run(table, items);
}
