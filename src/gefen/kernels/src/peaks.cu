// The peaks of chunks, for blocks that are cut in chunks.

#include "blocks.cuh"

struct Peaks {
    struct Memory {};
    static constexpr bool STAGES = false;
    __device__ static bool quantised(const Task& task) { return task.index; }
};

// Written: task.peaks and, since later launches overwrite the state, task.before.
extern "C" __launch_bounds__(THREADS) __global__ void peaks(const void* table, long long items) {
    SHARED(Shared<Peaks>, shared);
    const Table<Task> tasks(table);
    if (tasks.header->codebook) shared.codebook.load(tasks.header->codebook);
    for_items(shared, tasks, items, [&](long long item) {
        const Task& task = shared.task;
        Walk<Peaks> walk(shared);
        long long start, stop;
        walk.limits(item, start, stop);
        const Peak peak = joined_threads(walk.scan<false>(start, stop, false), shared.warps);
        if (threadIdx.x) return;
        task.peaks[item] = peak;
        const long long block = item / task.chunks;
        if (item % task.chunks == 0) task.before[block] = walk.moments(block);
    });
}
