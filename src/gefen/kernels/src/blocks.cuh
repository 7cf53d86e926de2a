// Walks tensors in blocks of any length, each with a largest magnitude and a sum of squares that
// must be known before its first element can be written.
//
// An item of work is a run of whole blocks that fit in a tile, one longer block, or a chunk of a
// block longer still, whose peaks another launch has found. What fits in a tile is read once and
// kept in shared memory; of the rest, each element is read twice. All sums are made in a fixed
// order.
//
// An operation Op says what is made of the elements:
//   Memory: what it keeps in shared memory.
//   STAGES: whether it keeps tiles there.
//   quantised(task): whether the elements are a quantised momentum mixed with the gradient,
//     rather than the gradient itself.
//   settle(task, old moments, peak, new moments): what its block's elements need to know.
//   apply(walk, place, split, values, gradient): the rest.
//
// There is one copy of each part, for all lengths of blocks and kinds of numbers: each kernel is
// compiled for many architectures, on the user's machine too.
#pragma once

#include "quantise.cuh"

#define TILE_VECTORS (2 * THREADS)  // as in packing.py
#define TILE (TILE_VECTORS * WIDTH)
#define LOG_WARP (WARP == 32 ? 5 : WARP == 8 ? 3 : 2)
static_assert(1 << LOG_WARP == WARP);

// What a block's elements need to know.
struct Outcome {
    float old;  // magnitude before
    float top;  // and after
    float step;
};

// A vector's gradient and indices.
struct Source {
    Packed grad;
    Bytes index;
};

template <bool STAGES>
struct Stage {
    uint4 low[TILE_VECTORS], high[TILE_VECTORS];
    uint2 index[TILE_VECTORS];

    __device__ bool holds(int vector) const { return vector < TILE_VECTORS; }

    __device__ void put(int vector, const Source& source) {
        low[vector] = source.grad.get(0);
        high[vector] = source.grad.get(4);
        index[vector] = make_uint2(source.index.low, source.index.high);
    }

    __device__ void get(int vector, Source& source) const {
        source.grad.put(0, low[vector]);
        source.grad.put(4, high[vector]);
        source.index = {index[vector].x, index[vector].y};
    }
};

template <>
struct Stage<false> {
    __device__ bool holds(int) const { return false; }
    __device__ void put(int, const Source&) {}
    __device__ void get(int, Source&) const {}
};

// What a thread knows of a block's peak.
struct Part {
    double total;
    unsigned top;
};

template <class Op>
struct Shared {
    Task task;
    Codebook codebook;
    Stage<Op::STAGES> stage;
    typename Op::Memory memory;
    union {
        Peak cells[2 * TILE_VECTORS];
        Part parts[THREADS];  // of items that do not fit in a tile
    };
    Peak warps[THREADS / WARP];
    Outcome outcomes[2 * TILE_VECTORS];
};

__device__ inline Peak joined(Peak a, Peak b) {
    return {a.top > b.top ? a.top : b.top, a.total + b.total};
}

// Of `lanes` neighbouring lanes, a power of two, in each of them.
__device__ inline Peak joined_lanes(Peak peak, int lanes) {
    for (int distance = lanes / 2; distance; distance /= 2) {
        const unsigned top = __shfl_xor_sync(EVERY_LANE, peak.top, distance);
        const float total = __shfl_xor_sync(EVERY_LANE, peak.total, distance);
        peak = joined(peak, {top, total});
    }
    return peak;
}

// Of all warps, each of whose lanes has its own, in each thread. `warps` is scratch.
__device__ inline Peak joined_warps(const Peak& peak, Peak (&warps)[THREADS / WARP]) {
    __syncthreads();
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = peak;
    __syncthreads();
    Peak all = warps[0];
    for (int i = 1; i < THREADS / WARP; ++i) all = joined(all, warps[i]);
    return all;
}

// Of all threads, in each of them.
__device__ inline Peak joined_threads(const Peak& peak, Peak (&warps)[THREADS / WARP]) {
    return joined_warps(joined_lanes(peak, WARP), warps);
}

// Where a vector's elements lie among an item's blocks: those before `cut` in `block`, the others
// in the next one. Of blocks shorter than a vector, each element counts as a block of its own.
struct Split {
    int block, cut;
};

template <class Op>
struct Walk {
    Shared<Op>& shared;
    const Task& task;
    long long first;  // block in which the item starts
    long long base;  // element of its first vector
    int lead, size;  // from there, its elements are those from `lead` up to `size`
    bool fits;  // it is a run of whole blocks in a tile
    bool shorts;  // of blocks that are shorter than a vector

    __device__ Walk(Shared<Op>& shared, long long item) : shared(shared), task(shared.task) {
        const bool cut = task.chunks > 1;
        long long start = item * task.span, end = task.n;
        first = (cut ? item : start) / (cut ? task.chunks : task.period);
        if (cut) {
            start = first * task.period + (item - first * task.chunks) * task.span;
            end = (first + 1) * task.period;
        }
        lead = (int)(start % WIDTH);
        base = start - lead;
        size = (int)((end - start < task.span ? end - start : task.span) + lead);
        fits = !cut && task.span <= TILE;
        shorts = task.period < WIDTH;
    }

    // Whether it is the one of a block's chunks that keeps the block's state.
    __device__ bool leads() const { return base + lead == first * task.period; }

    __device__ void run() {
        if (shorts && task.magnitude) {
#pragma unroll 1
            for (int i = threadIdx.x; i < size; i += THREADS) {
                const int number = (int)((unsigned)i / (unsigned)task.period);
                shared.outcomes[i].old = task.magnitude[first + number];
            }
            __syncthreads();
        }
        // A loop, since the code would be twice as long otherwise.
#pragma unroll 1
        for (int settled = task.chunks > 1; settled < 2; ++settled) {
            if (settled) settle();
            pass(settled);
        }
    }

    // Go through the vectors. Until blocks are settled, leave the peaks in the cells if the item
    // fits in a tile, or else this thread's part of the peak; then apply the operation.
    __device__ void pass(bool settled) {
        if (!fits && !settled) shared.parts[threadIdx.x] = {0.0, 0};
        const int count = (size + WIDTH - 1) / WIDTH;
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const Place place(base, lead, size, i);
            Source source;
            read(i, place, settled, source);
            const Split split = split_of(i);
            float grad[WIDTH], value[WIDTH];
            source.grad.unpack(task.grad.kind, grad);
            blend(source.index, place, split, settled, grad, value);
            if (settled) {
                Op::apply(*this, place, split, value, source.grad);
                continue;
            }
            const Peak head = peak_of(grad, value, 0, split.cut);
            if (fits) {
                leave(i, split.cut, head, grad, value);
            } else {
                Part& part = shared.parts[threadIdx.x];
                if (head.top > part.top) part.top = head.top;
                part.total += head.total;
            }
        }
    }

    __device__ Peak own() const {
        const Part& part = shared.parts[threadIdx.x];
        return {part.top, (float)part.total};
    }

    // A vector as it is in memory, or as it was read before.
    __device__ void read(int vector, const Place& place, bool settled, Source& source) {
        const bool staged = task.chunks == 1 && shared.stage.holds(vector);
        if (staged && settled) {
            shared.stage.get(vector, source);
            return;
        }
        source.grad.load(task.grad, place);
        source.index = {0, 0};
        if (Op::quantised(task)) source.index.load(task.index, place, task.flags & ALIGNED);
        if (staged) shared.stage.put(vector, source);
    }

    __device__ Split split_of(int vector) const {
        if (!fits) return {0, WIDTH};
        const int offset = vector * WIDTH - lead;
        if (shorts) return {offset, WIDTH};
        const unsigned period = (unsigned)task.period;
        const int block = offset < 0 ? -1 : (int)((unsigned)offset / period);
        const int end = (block + 1) * (int)period - offset;
        return {block, end < WIDTH ? end : WIDTH};
    }

    // What each element's block has in a field of its outcome.
    __device__ void spread(float Outcome::*field, const Split& split, float (&out)[WIDTH]) const {
        const Outcome* from = shared.outcomes + (split.block < 0 ? 0 : split.block);
        if (shorts) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) out[j] = from[j].*field;
        } else {
            const float second = shared.outcomes[split.block + 1].*field;
            fill(from->*field, second, split.cut, out);
        }
    }

    __device__ static void fill(float first, float second, int cut, float (&out)[WIDTH]) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[j] = j < cut ? first : second;
    }

    // The elements of a place; 0 outside of it.
    __device__ void blend(const Bytes& index, const Place& place, const Split& split, bool settled,
                          const float (&grad)[WIDTH], float (&value)[WIDTH]) const {
        float old[WIDTH];
        if (Op::quantised(task)) {
            if (settled || shorts) {
                spread(&Outcome::old, split, old);
            } else {
                const float* from = task.magnitude + first;
                const float head = from[split.block < 0 ? 0 : split.block];
                fill(head, split.cut < place.to ? from[split.block + 1] : head, split.cut, old);
            }
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            value[j] = grad[j];
            if (Op::quantised(task)) {
                const float entry = shared.codebook.entry[index.get(j)];
                value[j] = mixed(entry * old[j], grad[j], task.mix);
            }
            if (!place.holds(j)) value[j] = 0.0f;
        }
    }

    __device__ static Peak peak_of(const float (&grad)[WIDTH], const float (&value)[WIDTH],
                                   int from, int to) {
        Peak peak = {0, 0.0f};
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j >= from && j < to) {
                peak = joined(peak, {magnitude_bits(value[j]), grad[j] * grad[j]});
            }
        }
        return peak;
    }

    // A vector leaves as many cells to be joined as it can touch blocks, so that the cells of a
    // block follow each other. `head`: of the elements before `cut`.
    __device__ void leave(int vector, int cut, const Peak& head, const float (&grad)[WIDTH],
                          const float (&value)[WIDTH]) {
        if (shorts) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                shared.cells[vector * WIDTH + j] = peak_of(grad, value, j, j + 1);
            }
        } else {
            shared.cells[vector * 2] = head;
            Peak tail = {0, 0.0f};
            if (cut < WIDTH) tail = peak_of(grad, value, cut, WIDTH);
            shared.cells[vector * 2 + 1] = tail;
        }
    }

    __device__ Moments moments(long long block) const {
        return {task.magnitude ? task.magnitude[block] : 0.0f, task.v ? task.v[block] : 0.0f};
    }

    // Join the peaks of each block with as many lanes as are worth it, and settle the block.
    __device__ void settle() {
        Peak own = {0, 0.0f};
        int blocks = 1, shift = LOG_WARP;  // two to the power of `shift` lanes
        if (fits) {
            __syncthreads();
            const int period = (int)task.period;
            blocks = (int)((unsigned)(size - lead) / (unsigned)period);
            shift = 0;
            while (shift < LOG_WARP && (4 * WIDTH << shift) < period * 2) ++shift;
        } else {
            own = joined_parts();
        }
        const int lane = threadIdx.x & ((1 << shift) - 1), group = (int)threadIdx.x >> shift;
#pragma unroll 1
        for (int first = 0; first < blocks; first += THREADS >> shift) {
            const int number = first + group;
            Peak peak = own;
            if (fits) peak = joined_cells(number < blocks ? number : -1, lane, 1 << shift);
            peak = joined_lanes(peak, 1 << shift);
            if (!fits) peak = joined_warps(peak, shared.warps);
            if (number < blocks && lane == 0) settle(number, peak);
        }
        __syncthreads();
    }

    // This thread's part of the peak of a block that is in no cells.
    __device__ Peak joined_parts() const {
        if (task.chunks == 1) return own();
        const Peak* peaks = task.peaks + first * task.chunks;
        Peak peak = {0, 0.0f};
#pragma unroll 4
        for (int i = threadIdx.x; i < task.chunks; i += THREADS) peak = joined(peak, peaks[i]);
        return peak;
    }

    // A lane's part of the peak of a block that is in cells; none for a negative number.
    __device__ Peak joined_cells(int number, int lane, int lanes) const {
        Peak peak = {0, 0.0f};
        if (number < 0) return peak;
        const int period = (int)task.period;
        const int from = lead + number * period, to = from + period;
        const int low = shorts ? from : from / WIDTH * 2 + (from % WIDTH != 0);
        const int high = shorts ? to : (to - 1) / WIDTH * 2 + 1;
#pragma unroll 2
        for (int i = low + lane; i < high; i += lanes) peak = joined(peak, shared.cells[i]);
        return peak;
    }

    __device__ void settle(int number, const Peak& peak) {
        const long long block = first + number;
        const bool cut = task.chunks > 1;
        Moments fresh;
        const Outcome outcome =
            Op::settle(task, cut ? task.before[block] : moments(block), peak, fresh);
        const int copies = shorts ? (int)task.period : 1;
#pragma unroll 1
        for (int i = 0; i < copies; ++i) shared.outcomes[number * copies + i] = outcome;
        if (cut && !leads()) return;
        if (task.magnitude) task.magnitude[block] = fresh.magnitude;
        if (task.v) task.v[block] = fresh.v;
    }
};

// Calls `act(item of its task)` for this block's items, with the task in `shared`. 32 bits count
// the items of 4 TB, and save registers.
template <class Op, class Act>
__device__ void for_items(Shared<Op>& shared, const Table<Task>& table, long long items, Act act) {
    int current = -1;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
        const int found = table.seek(current < 0 ? 0 : current, item);
        if (found != current) {
            const unsigned* from = reinterpret_cast<const unsigned*>(table.tasks + found);
            unsigned* to = reinterpret_cast<unsigned*>(&shared.task);
            for (unsigned i = threadIdx.x; i < sizeof(Task) / 4; i += THREADS) to[i] = from[i];
            __syncthreads();
            current = found;
        }
        act(item - table.first(current));
    }
}

// p <- p (1 - lr wd), rounded as an operation of its own.
__device__ inline void decay(const Task& task, float (&param)[WIDTH]) {
    if (!(task.flags & DECAYS)) return;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) param[j] *= task.keep;
    round_to(task.param.kind, param);
}

// What all kernels that step a quantised momentum share: Op::write takes the entries.
template <class Op>
struct Quantised {
    struct Memory {};
    static constexpr bool STAGES = true;

    __device__ static bool quantised(const Task&) { return true; }

    __device__ static Outcome settle(const Task&, const Moments& old, const Peak& peak,
                                     Moments& fresh) {
        fresh = {__uint_as_float(peak.top), 0.0f};
        return {old.magnitude, fresh.magnitude, 0.0f};
    }

    __device__ static void apply(const Walk<Op>& walk, const Place& place, const Split& split,
                                 float (&value)[WIDTH], const Packed& grad) {
        const Task& task = walk.task;
        const Codebook& codebook = walk.shared.codebook;
        Packed param;
        if (Op::READS) param.load(task.param, place);  // under way while indices are found
        float top[WIDTH];
        walk.spread(&Outcome::top, split, top);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) value[j] /= top[j] == 0.0f ? 1.0f : top[j];
        Bytes index = {0, 0};
        if (task.flags & STOCHASTIC) {
            draw(task, codebook, place, value, index);
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const unsigned chosen = codebook.nearest(value[j]);
                index.set(j, chosen);
                value[j] = codebook.entry[chosen];
            }
        }
        index.store(task.index, place, task.flags & ALIGNED);
        Op::write(walk, place, split, value, grad, param);
    }

    // Each value becomes one of its two neighbours among the entries.
    __device__ static void draw(const Task& task, const Codebook& codebook, const Place& place,
                                float (&value)[WIDTH], Bytes& index) {
        unsigned words[4] = {};
#pragma unroll 1
        for (int j = 0; j < WIDTH; ++j) {
            if (j % 4 == 0) philox((place.element + j) / 4, task.parameter, task.step, words);
            const float x = value[0];
            const unsigned chosen = codebook.drawn(x, codebook.nearest(x), uniform(words[0]));
            index.set(j, chosen);
            turn(value, codebook.entry[chosen]);
            turn(words, 0u);
        }
    }

    __device__ static void run(const void* memory, long long items) {
        SHARED(Shared<Op>, shared);
        const Table<Task> table(memory);
        shared.codebook.load(table.header->codebook);
        for_items(shared, table, items, [&](long long item) { Walk<Op>(shared, item).run(); });
    }
};
