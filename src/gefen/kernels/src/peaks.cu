// The peaks of chunks, for blocks that are cut in chunks.

#include "blocks.cuh"

struct Peaks {
    struct Memory {};
    static constexpr bool STAGES = false;
    __device__ static bool quantised(const Task& task) { return task.index; }
    __device__ static void apply(const Walk<Peaks>&, const Place&, const Split&,
                                 const float (&)[WIDTH], const Packed&) {}
};

// Written: task.peaks and, since later launches overwrite the state, task.before.
extern "C" __launch_bounds__(THREADS) __global__ void peaks(const void* table, long long items) {
    SHARED(Shared<Peaks>, shared);
    const Table<Task> tasks(table);
    if (tasks.header->codebook) shared.codebook.load(tasks.header->codebook);
    for_items(shared, tasks, items, [&](long long item) {
        const Task& task = shared.task;
        Walk<Peaks> walk(shared, item);
        walk.pass(false);
        const Peak peak = joined_threads(walk.own(), shared.warps);
        if (threadIdx.x) return;
        task.peaks[item] = peak;
        if (walk.leads()) task.before[walk.first] = walk.moments(walk.first);
    });
}
