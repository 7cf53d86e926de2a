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
