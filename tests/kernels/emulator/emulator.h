// CUDA on the CPU, as far as the kernels use it: C++20, no CUDA toolkit.
//
// A block's threads are fibers of one OS thread that take turns at barriers, or, with
// EMULATED_THREADS, OS threads of their own, so that ThreadSanitizer sees what they race for.
// Then several blocks run at once. Shared memory begins with garbage in it.
#pragma once

#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED(type, name) type& name = *emulator::shared<type>()

#ifndef THREADS
#define THREADS 64
#endif
#ifndef WARP
#define WARP 8
#endif

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

#ifdef EMULATED_THREADS
#include "threads.h"
#else
#include "fibers.h"
#endif

template <class T>
T* shared() {
    static_assert(sizeof(T) <= 48 * 1024, "more shared memory than every device has");
    return static_cast<T*>(here().block->memory(sizeof(T), alignof(T)));
}

inline void wait_warp() { here().block->wait_warp(here().thread / WARP); }

template <class T>
T exchange(T value, int source) {
    static_assert(sizeof(T) == 4);
    const int own = here().thread, first = own / WARP * WARP;
    unsigned* slots = here().block->slots;
    slots[own] = std::bit_cast<unsigned>(value);
    wait_warp();
    const T result = std::bit_cast<T>(slots[first + source]);
    wait_warp();
    return result;
}

}  // namespace emulator

#define threadIdx (dim3{(unsigned)emulator::here().thread, 0, 0})
#define blockIdx (dim3{(unsigned)emulator::here().block->number, 0, 0})
#define gridDim (dim3{(unsigned)emulator::here().block->grid})
#define blockDim (dim3{THREADS})

inline void __syncthreads() { emulator::here().block->wait(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulator::wait_warp(); }

inline int __syncthreads_count(int predicate) {
    auto* block = emulator::here().block;
    unsigned* slots = block->slots;
    slots[emulator::here().thread] = predicate != 0;
    block->wait();
    int count = 0;
    for (int i = 0; i < THREADS; ++i) count += slots[i];
    block->wait();
    return count;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return emulator::exchange(value, (emulator::here().thread % WARP) ^ distance);
}

template <class T>
T atomicAdd(T* target, T value) {
    return std::atomic_ref<T>(*target).fetch_add(value, std::memory_order_relaxed);
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

// float16, rounded to the nearest as the device's conversions do.
inline float half_to_float(unsigned bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u;
    const unsigned fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    const float size = exponent ? std::ldexp((float)(fraction | 0x400u), (int)exponent - 25)
                                : std::ldexp((float)fraction, -24);
    return __uint_as_float(sign | __float_as_uint(size));
}

inline unsigned float_to_half(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (size != size) return 0x7fffu;
    if (size >= 65520.0f) return sign | 0x7c00u;
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    const unsigned units = (unsigned)std::nearbyint(std::ldexp(size, 10 - exponent));
    return sign | (((unsigned)(exponent + 14) << 10) + units);  // a carry raises the exponent
}
