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

#define EVERY_LANE (0xffffffffu >> (32 - WARP))

#ifdef EMULATED
#define OPAQUE(value)
#else
#define SHARED(type, name) __shared__ type name
// The compiler must not know a value: it would make a copy of a loop for each.
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

// start + weight * (end - start), as torch.lerp computes it.
__device__ inline float mixed(float start, float end, float weight) {
    return weight < 0.5f ? fmaf(weight, end - start, start) : fmaf(weight - 1.0f, end - start, end);
}
