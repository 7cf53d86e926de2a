// Counts normalised gradients in bins, to learn a codebook from.

#include "blocks.cuh"

#define BINS 4096

struct Histogram {
    static constexpr bool STAGES = false, PLAIN = false;
    struct Memory {
        unsigned bins[BINS];
    };

    __device__ static bool quantised(const Task&) { return false; }

    __device__ static Outcome settle(const Task&, const Moments&, const Peak& peak,
                                     Moments& fresh) {
        fresh = {0.0f, 0.0f};
        return {0.0f, __uint_as_float(peak.top), 0.0f, 0.0f};
    }

    template <bool>
    __device__ static bool apply(Walk<Histogram>& walk, const Place& place, const Split& split,
                                 float (&value)[WIDTH]) {
        float tops[WIDTH];
        walk.spread(&Outcome::top, split, tops);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (!place.holds(j)) continue;
            const float top = tops[j];
            if (magnitude_bits(top) >= 0x7f800000u) continue;  // its block has an infinity or NaN
            const float x = (value[j] / (top == 0.0f ? 1.0f : top) + 1.0f) * (BINS / 2);
            const int bin = (int)x;
            atomicAdd(&walk.shared.memory.bins[bin < BINS - 1 ? bin : BINS - 1], 1u);
        }
        return true;
    }
};

// Added to: the header's counts.
extern "C" __launch_bounds__(THREADS, 3) __global__ void histogram(const void* table,
                                                                   long long items) {
    SHARED(Shared<Histogram>, shared);
    const Table<Task> tasks(table);
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.memory.bins[i] = 0;
    for_items(shared, tasks, items,
              [&](unsigned item) { Walk<Histogram>(shared, item).run(); });
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        if (shared.memory.bins[i]) {
            atomicAdd(tasks.header->counts + i, (unsigned long long)shared.memory.bins[i]);
        }
    }
}
