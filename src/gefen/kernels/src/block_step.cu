// Steps parameters whose second moment is shared by blocks.

#include "quantised.cuh"

struct Block : Quantised<Block> {
    static constexpr bool READS = true;
    static constexpr float Outcome::*FIELD = &Outcome::step;

    __device__ static Outcome settle(const Task& task, const Moments& old, const Peak& peak,
                                     Moments& fresh) {
        fresh = {__uint_as_float(peak.top), fmaf(peak.total, task.share, old.v * task.beta2)};
        const float below = floored(sqrtf(fresh.v) / task.root2 + task.eps);
        float step = fresh.magnitude * task.rate / below;
        // Then no entry becomes NaN for being 0. An infinite magnitude has come with an infinite
        // second moment, so that its step is NaN.
        if (fabsf(step) > LARGEST) step = copysignf(LARGEST, step);
        return {old.magnitude, fresh.magnitude, step, 0.0f};
    }

    __device__ static void write(const Task& task, const Place& place, float (&entry)[WIDTH],
                                 const float (&step)[WIDTH], const Packed& packed) {
        float param[WIDTH];
        packed.unpack(task.param.kind, param);
        decay(task, param);
        bool far = false;  // entries are at most 1
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) far |= fabsf(step[j]) > task.reach;
        if (__builtin_expect(far, false)) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const float move = entry[j] * step[j];
                param[j] -= fabsf(step[j]) > task.reach ? bounded(task, move) : move;
            }
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) param[j] = fmaf(-entry[j], step[j], param[j]);
        }
        write_param(task, place, param);
    }
};

extern "C" __launch_bounds__(THREADS, RESIDENT) __global__ void block_step(const void* table,
                                                                        long long items) {
    Block::run(table, items);
}
