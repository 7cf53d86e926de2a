// The peaks of chunks, for blocks that are cut in chunks.

#include "blocks.cuh"

struct Peaks {
    struct Memory {};
    static constexpr bool STAGES = false, PLAIN = false;
    __device__ static bool quantised(const Task& task) { return task.index; }
    template <bool>
    __device__ static bool apply(const Walk<Peaks>&, const Place&, const Split&,
                                 const float (&)[WIDTH]) {
        return true;
    }
};

// Written: task.peaks and, since later launches overwrite the state, task.before.
extern "C" __launch_bounds__(THREADS) __global__ void peaks(const void* table, long long items) {
    SHARED(Shared<Peaks>, shared);
    const Table<Task> tasks(table);
    if (tasks.header->codebook) shared.codebook.load(tasks.header->codebook);
    for_items(shared, tasks, items, [&](unsigned item) {
        const Task& task = shared.task;
        Walk<Peaks> walk(shared, item);
        walk.clear();
        walk.pass<false>(false, threadIdx.x);
        const Peak peak = joined_threads(walk.own(), shared.warps);
        if (threadIdx.x) return;
        task.peaks[item] = peak;
        if (walk.leads()) task.before[walk.first] = walk.moments(walk.first);
    });
}
