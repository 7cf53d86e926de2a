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
//   STAGES: whether it keeps the elements of tiles there.
//   quantised(task): whether the elements are a quantised momentum mixed with the gradient,
//     rather than the gradient itself.
//   settle(task, old moments, peak, new moments): what its block's elements need to know.
//   apply<PLAIN>(walk, place, split, values): the rest.
//
// There are two copies of each part: PLAIN for tensors of whole vectors that are aligned and lie
// in one block each, as nearly all do; and one for all others, of any length and kind. Each kernel
// is compiled for many architectures, on the user's machine too.
#pragma once

#include "quantise.cuh"

#define TILE_VECTORS (2 * THREADS)  // as in packing.py
#define TILE (TILE_VECTORS * WIDTH)
#define LOG_WARP (WARP == 32 ? 5 : WARP == 8 ? 3 : 2)
static_assert(1 << LOG_WARP == WARP);

// What a block's elements need to know.
struct alignas(16) Outcome {
    float old;  // magnitude before
    float top;  // and after
    float step;
    float inverse;  // inverse_of(top)
};

template <bool STAGES>
struct Stage {
    uint4 low[TILE_VECTORS], high[TILE_VECTORS];

    __device__ void put(int vector, const float (&values)[WIDTH]) {
        Packed packed;
        packed.pack(FLOAT32, values);
        low[vector] = packed.get(0);
        high[vector] = packed.get(4);
    }

    __device__ void get(int vector, float (&values)[WIDTH]) const {
        Packed packed;
        packed.put(0, low[vector]);
        packed.put(4, high[vector]);
        packed.unpack(FLOAT32, values);
    }
};

template <>
struct Stage<false> {
    __device__ void put(int, const float (&)[WIDTH]) {}
    __device__ void get(int, float (&)[WIDTH]) const {}
};

__device__ inline void fill(float value, float (&out)[WIDTH]) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) out[j] = value;
}

// What a thread knows of a block's peak.
struct Part {
    double total;
    unsigned top;
};

template <class Op>
struct Shared {
    Task task;
    unsigned number, first, end;  // of the task, and of its items
    union {
        Codebook codebook;
        typename Op::Memory memory;  // of those without one
    };
    union {
        Peak cells[2 * TILE_VECTORS];
        Part parts[THREADS];  // of items that do not fit in a tile
    };
    Peak warps[THREADS / WARP];
    union {
        Outcome outcomes[2 * TILE_VECTORS];  // so many of blocks that are shorter than a vector
        struct {
            Outcome few[TILE_VECTORS + 1];  // so many of others
            Stage<Op::STAGES> stage;  // of others
        };
    };
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
    bool keeps;  // it keeps what it reads, as far as there is room
    unsigned share;  // 2^32 / period, rounded up, where it fits; 0 for a period of 1

    __device__ Walk(Shared<Op>& shared, unsigned item) : shared(shared), task(shared.task) {
        const bool cut = task.chunks > 1;
        fits = !cut && task.span <= TILE;
        shorts = task.period < WIDTH;
        keeps = Op::STAGES && !cut && !shorts;
        // A single division of 32 bits: those of 64 bits take as long as a vector.
        const unsigned ratio = (cut ? item : ~0u) / (unsigned)(cut ? task.chunks : task.period);
        share = ratio + 1;
        long long start = item * task.span, end = task.n;
        if (cut) {
            first = ratio;
            start = first * task.period + (item - ratio * (unsigned)task.chunks) * task.span;
            end = (first + 1) * task.period;
        } else {
            first = fits ? (long long)item * blocks_of((unsigned)task.span) : item;
        }
        lead = (int)(start % WIDTH);
        base = start - lead;
        size = (int)((end - start < task.span ? end - start : task.span) + lead);
    }

    // Whole blocks in so many elements of a tile: exact, as both are at most TILE.
    __device__ unsigned blocks_of(unsigned elements) const {
        return share ? (unsigned)((unsigned long long)elements * share >> 32) : elements;
    }

    // Whether all of its tensors' vectors are whole, aligned and in one block each.
    __device__ bool plain() const {
        return task.period % WIDTH == 0 && task.grad.aligned && !(task.flags & STOCHASTIC) &&
               (!task.index || task.flags & ALIGNED) && (!task.param.data || task.param.aligned);
    }

    // Whether it is the one of a block's chunks that keeps the block's state.
    __device__ bool leads() const { return base + lead == first * task.period; }

    __device__ void run() {
        if (shorts && task.magnitude) {
#pragma unroll 1
            for (int i = threadIdx.x; i < size; i += THREADS) {
                shared.outcomes[i].old = task.magnitude[first + blocks_of(i)];
            }
            __syncthreads();
        }
        clear();
        const bool easy = Op::PLAIN && plain();
        // A loop, since the code would be twice as long otherwise.
#pragma unroll 1
        for (int settled = task.chunks > 1; settled < 2; ++settled) {
            if (settled) settle();
            int next = threadIdx.x;
            if (easy) next = pass<Op::PLAIN>(settled, next);
            pass<false>(settled, next);
        }
    }

    __device__ void clear() {
        if (!fits) shared.parts[threadIdx.x] = {0.0, 0};
    }

    // Go through the vectors. Until blocks are settled, leave the peaks in the cells if the item
    // fits in a tile, or else this thread's part of the peak; then apply the operation.
    // The first vector from `from` on that is not done: a PLAIN one stops where it must.
    template <bool PLAIN>
    __device__ int pass(bool settled, int from) {
        const int count = (size + WIDTH - 1) / WIDTH;
        int i = from;
#pragma unroll 1
        for (; i < count; i += THREADS) {
            const Place place = PLAIN ? Place(base + i * WIDTH) : Place(base, lead, size, i);
            const Split split = split_of<PLAIN>(i);
            const bool staged = keeps && i < TILE_VECTORS;
            float value[WIDTH];
            if (settled && staged) {
                shared.stage.get(i, value);
            } else {
                float grad[WIDTH];
                read<PLAIN>(place, split, settled, grad, value);
                if (!settled) {
                    if (staged) shared.stage.put(i, value);
                    keep<PLAIN>(i, split.cut, grad, value);
                    continue;
                }
            }
            if (!Op::template apply<PLAIN>(*this, place, split, value)) break;
        }
        return i;
    }

    // Leave a vector's part of the peaks; overwrites the elements.
    template <bool PLAIN>
    __device__ void keep(int vector, int cut, float (&grad)[WIDTH], float (&value)[WIDTH]) {
        Peak head = {0, 0.0f}, tail = {0, 0.0f};
        if (PLAIN) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) head = joined(head, peak_of(grad[j], value[j]));
        } else {
#pragma unroll 1
            for (int j = 0; j < WIDTH; ++j) {
                const Peak own = peak_of(grad[0], value[0]);
                if (shorts) shared.cells[vector * WIDTH + j] = own;
                if (j < cut) {
                    head = joined(head, own);
                } else {
                    tail = joined(tail, own);
                }
                turn(grad, 0.0f);
                turn(value, 0.0f);
            }
        }
        if (fits) {
            // As many cells as a vector can touch blocks, so that those of a block follow each other.
            if (!PLAIN && shorts) return;
            shared.cells[vector * 2] = head;
            shared.cells[vector * 2 + 1] = tail;
        } else {
            Part& part = shared.parts[threadIdx.x];
            if (head.top > part.top) part.top = head.top;
            part.total += head.total;
        }
    }

    __device__ Peak own() const {
        const Part& part = shared.parts[threadIdx.x];
        return {part.top, (float)(part.total * task.rest)};
    }

    // A vector's gradient, and the value that it advances.
    template <bool PLAIN>
    __device__ void read(const Place& place, const Split& split, bool settled,
                         float (&grad)[WIDTH], float (&value)[WIDTH]) const {
        Packed packed;
        packed.load(task.grad, place);
        Bytes index = {0, 0};
        if (Op::quantised(task)) index.load(task.index, place, task.flags & ALIGNED);
        packed.unpack(task.grad.kind, grad);
        blend<PLAIN>(index, place, split, settled, grad, value);
    }

    template <bool PLAIN>
    __device__ Split split_of(int vector) const {
        if (!fits) return {0, WIDTH};
        if (PLAIN) return {(int)blocks_of(vector * WIDTH), WIDTH};
        const int offset = vector * WIDTH - lead;
        if (shorts) return {offset, WIDTH};
        const int block = offset < 0 ? -1 : (int)blocks_of(offset);
        const int end = (block + 1) * (int)task.period - offset;
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
            join(from->*field, second, split.cut, out);
        }
    }

    __device__ static void join(float first, float second, int cut, float (&out)[WIDTH]) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[j] = j < cut ? first : second;
    }

    // The elements of a place; 0 outside of it.
    template <bool PLAIN>
    __device__ void blend(const Bytes& index, const Place& place, const Split& split, bool settled,
                          const float (&grad)[WIDTH], float (&value)[WIDTH]) const {
        float old[WIDTH];
        if (Op::quantised(task)) {
            if (PLAIN) {
                const float* from = task.magnitude + first;
                IN_GLOBAL(from);
                fill(settled ? shared.outcomes[split.block].old : from[split.block], old);
            } else if (settled || shorts) {
                spread(&Outcome::old, split, old);
            } else {
                const float* from = task.magnitude + first;
                IN_GLOBAL(from);
                const float head = from[split.block < 0 ? 0 : split.block];
                join(head, split.cut < place.to ? from[split.block + 1] : head, split.cut, old);
            }
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) value[j] = grad[j];
        if (Op::quantised(task)) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) old[j] *= shared.codebook.entry[index.get(j)];
            mix(old, grad, task.mix, value);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) value[j] = place.holds(j) ? value[j] : 0.0f;
    }

    __device__ Peak peak_of(float grad, float value) const {
        return {magnitude_bits(value), grad * task.scale * grad};
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
            blocks = (int)blocks_of(size - lead);
            shift = 0;
#pragma unroll
            for (int i = 0; i < LOG_WARP; ++i) shift += (4 * WIDTH << i) < period * 2;
        } else {
            own = joined_parts();
        }
        const int lane = threadIdx.x & ((1 << shift) - 1), group = (int)threadIdx.x >> shift;
#pragma unroll 1
        for (int first = 0; first < blocks; first += THREADS >> shift) {
            const int number = first + group;
            // A warp that has no block left; each has its part of one that does not fit.
            if (fits && first + (int)(threadIdx.x / WARP * WARP >> shift) >= blocks) break;
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
        Outcome outcome = Op::settle(task, cut ? task.before[block] : moments(block), peak, fresh);
        outcome.inverse = inverse_of(outcome.top);
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
    if (!threadIdx.x) shared.number = shared.end = 0;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
        __syncthreads();
        if (item >= shared.end) {
            const int current = table.seek(shared.number, item);
            const unsigned* from = reinterpret_cast<const unsigned*>(table.tasks + current);
            unsigned* to = reinterpret_cast<unsigned*>(&shared.task);
            for (unsigned i = threadIdx.x; i < sizeof(Task) / 4; i += THREADS) to[i] = from[i];
            if (!threadIdx.x) {
                shared.number = current;
                shared.first = (unsigned)table.first(current);
                shared.end = (unsigned)table.ends[current];
            }
            __syncthreads();
        }
        act(item - shared.first);
    }
}
