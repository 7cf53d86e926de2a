// The kernels' own sources, compiled for the emulator, and an entry that launches them by name.
#include "emulator.h"

#include "block_step.cu"
#include "factored_step.cu"
#include "histogram.cu"
#include "momentum.cu"
#include "peaks.cu"
#include "probe.cu"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using Kernel = void (*)(const void*, long long);

struct Named {
    const char* name;
    Kernel kernel;
};

static const Named KERNELS[] = {
    {"block_step", block_step},       {"factor_means", factor_means},
    {"factor_roots", factor_roots},   {"factor_sums", factor_sums},
    {"factored_step", factored_step}, {"histogram", histogram},
    {"momentum", momentum},           {"peaks", peaks},
    {"probe", probe},
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

EXPORTED int sizes(int which) {
    const int all[] = {sizeof(Task), sizeof(Factors), sizeof(Codebook), sizeof(Header), THREADS,
                       WARP, TILE, STRIP, PANEL};
    return all[which];
}
