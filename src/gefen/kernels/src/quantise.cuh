// Quantisation against the codebook: nearest entry, or one of two neighbours at random.
#pragma once

#include "vector.cuh"

#define ENTRIES 256
#define SECTORS 4096  // parts of [-1, 1], about as wide as the bins that codebooks are learned from

// What launch.py lays out in this order; loaded into shared memory.
struct Codebook {
    float entry[ENTRIES];
    float threshold[ENTRIES];  // the index of x is the number of those below x
    // Of each sector, the lowest index and, shifted by 8, how many thresholds lie in it.
    unsigned short bounds[SECTORS];
    unsigned char following[ENTRIES];  // index of the next larger entry

    // All threads call it together, and synchronise afterwards.
    __device__ void load(const unsigned* from) {
        unsigned* to = reinterpret_cast<unsigned*>(this);
        for (unsigned i = threadIdx.x; i < sizeof(Codebook) / 4; i += THREADS) to[i] = from[i];
    }

    // Of the sector of a number in [-1, 1]; of some sector for others and NaN.
    __device__ unsigned bound(float x) const {
        // The last bits of a sum beyond 2^23 are its whole part.
        const float at = fmaf(x, SECTORS / 2 - 1, 0x1p23f + SECTORS / 2);
        unsigned sector = __float_as_uint(at) % SECTORS;
        OPAQUE(sector);
        return bounds[sector];
    }

    // That of -1 for NaN.
    __device__ unsigned nearest(float x) const {
        const unsigned found = bound(fmaxf(x, -1.0f));
        unsigned low = found & 255u, high = low + (found >> 8);
#pragma unroll 1
        while (low < high) {
            const unsigned middle = (low + high) / 2;
            if (x > threshold[middle]) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }

    // Indices of eight numbers in [-1, 1], and whether their sectors have at most one threshold each,
    // as nearly all have: else the indices are wrong.
    __device__ bool nearest(const float (&x)[WIDTH], unsigned (&index)[WIDTH]) const {
        unsigned found[WIDTH], every = 0;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) every |= found[j] = bound(x[j]);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            unsigned low = found[j] & 255u;
            OPAQUE(low);
            index[j] = passed(threshold, low, found[j], x[j]);
        }
        return every < 512u;
    }

    // The neighbour of x that `draw`, uniform in [0, 1), picks by distance; x is nearest to
    // entry `lower`.
    __device__ unsigned drawn(float x, unsigned lower, float draw) const {
        if (x < entry[lower] && lower > 0) --lower;
        const unsigned upper = following[lower];
        const float chance = (x - entry[lower]) / (entry[upper] - entry[lower]);
        return draw < chance ? upper : lower;  // never for a chance that is NaN
    }
};

// Four words for elements 4 * block to 4 * block + 3: Philox-4x32-10, Salmon et al. 2011.
__device__ inline void philox(unsigned long long block, unsigned long long parameter,
                              unsigned long long step, unsigned (&out)[4]) {
    unsigned c0 = (unsigned)block, c1 = (unsigned)(block >> 32);
    unsigned c2 = (unsigned)parameter, c3 = (unsigned)(parameter >> 32);
    unsigned k0 = (unsigned)step, k1 = (unsigned)(step >> 32);
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p0 = (unsigned long long)c0 * 0xD2511F53u;
        const unsigned long long p1 = (unsigned long long)c2 * 0xCD9E8D57u;
        c0 = (unsigned)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned)p1;
        c2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// The words of consecutive elements.
struct Words {
    unsigned words[4] = {};

    // That of an element, which is the first or follows the one before.
    __device__ unsigned next(unsigned long long element, bool first, unsigned long long parameter,
                             unsigned long long step) {
        const unsigned lane = (unsigned)element % 4;
        if (first || !lane) {
            philox(element / 4, parameter, step, words);
#pragma unroll 1
            for (unsigned i = 0; i < lane; ++i) turn(words, 0u);
        }
        const unsigned word = words[0];
        turn(words, 0u);
        return word;
    }
};

// One of a number's two bfloat16 neighbours at random, by distance; of what is not finite, or would
// not be, the number itself, which then must be rounded.
__device__ inline float rounded(float value, unsigned word) {
    const unsigned bits = __float_as_uint(value) + (word >> 16);
    const bool finite = magnitude_bits(value) < 0x7f800000u && (bits & 0x7fffffffu) < 0x7f800000u;
    return finite ? __uint_as_float(bits & 0xffff0000u) : value;
}

// A number in [0, 1) from one of them, as gefen.codebook.counter_uniform makes it.
__device__ inline float uniform(unsigned word) { return (float)(word >> 8) * 0x1p-24f; }
