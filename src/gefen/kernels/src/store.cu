// Writes memory from a kernel's own arguments: a captured graph keeps a copy of these, so that its
// replays need no memory of the host.

#include "platform.cuh"

#define PAYLOAD 504  // words: 4096 bytes of arguments, less the others; as in cuda.py

struct Payload {
    unsigned long long word[PAYLOAD];
};

extern "C" __launch_bounds__(THREADS) __global__ void store(
    unsigned long long* to, long long count, const __grid_constant__ Payload payload) {
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = payload.word[i];
}
