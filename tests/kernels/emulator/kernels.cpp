// The kernels' own sources, compiled for the emulator, and an entry that launches them by name.
// BLOCK_STEP_ONLY: fewer of them, which compiles faster.
#include "emulator.h"

#include "block_step.cu"
#include "peaks.cu"
#ifndef BLOCK_STEP_ONLY
#include "factored_step.cu"
#include "histogram.cu"
#include "momentum.cu"
#include "probe.cu"
#include "store.cu"
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

using Kernel = void (*)(const void*, long long);

struct Named {
    const char* name;
    Kernel kernel;
};

static const Named KERNELS[] = {
    {"block_step", block_step},
    {"peaks", peaks},
#ifndef BLOCK_STEP_ONLY
    {"factor_means", factor_means},
    {"factor_roots", factor_roots},
    {"factor_sums", factor_sums},
    {"factored_step", factored_step},
    {"histogram", histogram},
    {"momentum", momentum},
    {"probe", probe},
#endif
};

// Runs the blocks from `first` on. 0, or 1 if there is no such kernel.
EXPORTED int emulate(const char* name, long long first, long long grid, const void* table,
                       long long items) {
    for (const Named& named : KERNELS) {
        if (std::strcmp(named.name, name)) continue;
        emulator::run_grid(first, grid, [&] { named.kernel(table, items); });
        return 0;
    }
    return 1;
}

#ifndef BLOCK_STEP_ONLY
EXPORTED void emulate_store(unsigned long long* to, long long count, const Payload* payload) {
    emulator::run_grid(0, 1, [&] { store(to, count, *payload); });
}

EXPORTED int sizes(int which) {
    const int all[] = {sizeof(Task), sizeof(Factors), sizeof(Codebook), sizeof(Header), THREADS,
                       WARP, TILE, STRIP, PANEL, sizeof(Payload)};
    return all[which];
}
#endif
