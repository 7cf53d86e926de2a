// What the kernels need from the compiler. The CPU emulator of the tests includes its own
// definitions of CUDA's built-ins first and compiles the same text as C++20.
//
// Compiled without contraction of a * b + c (--fmad=false): every fused operation is written
// as fmaf, so that a device and the emulator give the same bits.
#pragma once

#ifndef THREADS
#define THREADS 256  // per block; launch.py lays out its tables for the same number
#endif
#ifndef WARP
#define WARP 32
#endif

// Blocks for which a multiprocessor has registers. From sm_120 on, they would be too few for four,
// and shared memory holds only two.
#define RESIDENT (__CUDA_ARCH__ >= 1200 ? 3 : 4)

#define EVERY_LANE (0xffffffffu >> (32 - WARP))

#ifdef EMULATED
#define OPAQUE(value)
#define IN_GLOBAL(pointer)
#else
// Tables hold addresses of global memory, where the compiler would look in shared memory too.
#define IN_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#define SHARED(type, name) __shared__ type name
// The compiler must not know a value: it would make a copy of a loop for each, or turn a mask and a
// multiplication into more than that.
#define OPAQUE(value) asm volatile("" : "+r"(value))

__device__ inline float half_to_float(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ inline unsigned float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ inline float bfloat_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ inline unsigned float_to_bfloat(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;  // NaN
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// `index`, or one more if the threshold of that index, which counts where `found` is above 255, is
// below x. As a branch it would be longer than what it skips.
__device__ inline unsigned passed(const float* thresholds, unsigned index, unsigned found,
                                  float x) {
#ifdef EMULATED
    return index + (found > 255u && x > thresholds[index]);
#else
    // First the threshold's address, then itself.
    unsigned at = (unsigned)__cvta_generic_to_shared(thresholds) + 4 * index;
    asm("{\n\t"
        ".reg .pred counts, below;\n\t"
        ".reg .f32 threshold;\n\t"
        "setp.gt.u32 counts, %2, 255;\n\t"
        "@counts ld.shared.b32 %1, [%1];\n\t"
        "mov.b32 threshold, %1;\n\t"
        "setp.gt.and.f32 below, %3, threshold, counts;\n\t"
        "@below add.u32 %0, %0, 1;\n\t"
        "}"
        : "+r"(index), "+r"(at)
        : "r"(found), "f"(x));
    return index;
#endif
}

// Two numbers as float16 or as bfloat16, the first in the lower half of a word.
__device__ inline unsigned float_to_halves(float low, float high) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return float_to_half(low) | float_to_half(high) << 16;
#endif
}

__device__ inline unsigned float_to_bfloats(float low, float high) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return float_to_bfloat(low) | float_to_bfloat(high) << 16;
#endif
}

// The magnitude's bits: they order as the magnitudes do, with NaN above infinity.
__device__ inline unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// value / top, correctly rounded, where `inverse` is 1 / top and `rest` what that lacks: the
// first line is off by less than a unit in the last place, the second rounds it (Markstein 1990).
__device__ inline float quotient(float value, float top, float inverse, float rest) {
    const float near = fmaf(value, inverse, value * rest);
    return fmaf(fmaf(-near, top, value), inverse, near);
}

// 1 / top, or 0 unless `top` is so far from the ends of the exponents that nothing which a quotient
// above 2^-43 needs leaves them.
__device__ inline float inverse_of(float top) {
    return top >= 0x1p-60f && top <= 0x1p60f ? 1.0f / top : 0.0f;
}
