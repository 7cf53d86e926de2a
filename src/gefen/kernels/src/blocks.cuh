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
//   apply(shared, place, values, gradient, outcomes): the rest.
#pragma once

#include "quantise.cuh"

#define TILE_VECTORS (2 * THREADS)  // as in packing.py
#define TILE (TILE_VECTORS * WIDTH)

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

template <class Op>
struct Shared {
    Task task;
    Codebook codebook;
    Stage<Op::STAGES> stage;
    typename Op::Memory memory;
    Peak cells[2 * TILE_VECTORS];
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

// Of all threads, in each of them. `warps` is scratch.
__device__ inline Peak joined_threads(Peak peak, Peak (&warps)[THREADS / WARP]) {
    peak = joined_lanes(peak, WARP);
    __syncthreads();
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = peak;
    __syncthreads();
    Peak all = warps[0];
    for (int i = 1; i < THREADS / WARP; ++i) all = joined(all, warps[i]);
    return all;
}

// Where a vector's elements lie among blocks of at least eight elements: those before `cut` in
// `block`, the others in the next one.
struct Split {
    int block, cut;

    __device__ Split(int offset, unsigned period) {
        block = offset < 0 ? -1 : (int)((unsigned)offset / period);
        const long long end = (block + 1LL) * period - offset;
        cut = end < WIDTH ? (int)end : WIDTH;
    }
};

// A value for each element of a vector that touches at most two blocks.
template <class T>
struct Halves {
    T first, second;
    int cut;

    __device__ explicit Halves(const T& value) : first(value), second(value), cut(WIDTH) {}

    __device__ Halves(const T* values, int offset, unsigned period, const Place& place) {
        const Split split(offset, period);
        cut = split.cut;
        first = values[split.block < 0 ? 0 : split.block];
        second = cut < place.to ? values[split.block + 1] : first;
    }

    __device__ T at(int j) const { return j < cut ? first : second; }
};

// For blocks of less than eight elements. Looked up each time, which is slow but needs few
// registers: such blocks are rare.
template <class T>
struct Each {
    const T* values;
    int offset;
    unsigned period;

    __device__ Each(const T* values, int offset, unsigned period, const Place&)
        : values(values), offset(offset), period(period) {}

    __device__ const T& at(int j) const { return values[(unsigned)(offset + j) / period]; }
};

template <class T, bool SHORT>
struct Choice {
    using type = Halves<T>;
};

template <class T>
struct Choice<T, true> {
    using type = Each<T>;
};

__device__ inline float magnitude_of(float old) { return old; }
__device__ inline float magnitude_of(const Outcome& outcome) { return outcome.old; }

template <class Op>
struct Walk {
    Shared<Op>& shared;
    const Task& task;

    __device__ explicit Walk(Shared<Op>& shared) : shared(shared), task(shared.task) {}

    __device__ void load(Source& source, const Place& place) const {
        source.grad.load(task.grad, place);
        source.index = {0, 0};
        if (Op::quantised(task)) source.index.load(task.index, place, task.flags & ALIGNED);
    }

    // The elements of a place; 0 outside of it. `old` tells the magnitudes of their blocks.
    template <class Old>
    __device__ void blend(const Source& source, const Place& place, const Old& old,
                          float (&grad)[WIDTH], float (&value)[WIDTH]) const {
        source.grad.unpack(task.grad.kind, grad);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            value[j] = grad[j];
            if (!place.holds(j)) {
                value[j] = 0.0f;
            } else if (Op::quantised(task)) {
                const float entry = shared.codebook.entry[source.index.get(j)];
                value[j] = mixed(entry * magnitude_of(old.at(j)), grad[j], task.mix);
            }
        }
    }

    __device__ Moments moments(long long block) const {
        return {task.magnitude ? task.magnitude[block] : 0.0f, task.v ? task.v[block] : 0.0f};
    }

    __device__ void settle(int number, long long block, const Moments& old, const Peak& peak,
                           bool publishes) {
        Moments fresh;
        shared.outcomes[number] = Op::settle(task, old, peak, fresh);
        if (publishes && task.magnitude) task.magnitude[block] = fresh.magnitude;
        if (publishes && task.v) task.v[block] = fresh.v;
    }

    __device__ void limits(long long item, long long& start, long long& stop) const {
        const long long block = item / task.chunks;
        const long long end = task.chunks > 1 ? (block + 1) * task.period : task.n;
        start = task.chunks > 1 ? block * task.period + item % task.chunks * task.span
                                : item * task.span;
        stop = start + task.span < end ? start + task.span : end;
    }

    // Work item number `item` of the task.
    __device__ void run(long long item) {
        if (task.period < WIDTH) {
            run_blocks<true>(item);
        } else {
            run_blocks<false>(item);
        }
    }

    // SHORT: blocks of less than a vector.
    template <bool SHORT>
    __device__ void run_blocks(long long item) {
        long long start, stop;
        limits(item, start, stop);
        const bool scans = task.chunks == 1;
        const bool fits = scans && task.span <= TILE;
        Peak peak = {0, 0.0f};
        if (scans) peak = scan<SHORT>(start, stop, fits);
        if (fits) {
            __syncthreads();
            join<SHORT>(start, (int)((stop - start) / task.period));
        } else {
            settle_long(item, start / task.period, peak);
        }
        __syncthreads();
        const int count = vectors(start, stop);
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const Place place(start, stop, i);
            Source source;
            if (scans && shared.stage.holds(i)) {
                shared.stage.get(i, source);
            } else {
                load(source, place);
            }
            close(place, source, part<Outcome, SHORT>(shared.outcomes, start, place, fits));
        }
    }

    // What each element's block has in `values`, the first of which is that of `start`.
    template <class T, bool SHORT>
    __device__ typename Choice<T, SHORT>::type part(const T* values, long long start,
                                                    const Place& place, bool fits) const {
        const int offset = fits ? (int)(place.element - start) : 0;
        const unsigned period = fits ? (unsigned)task.period : WIDTH;
        return typename Choice<T, SHORT>::type(values, offset, period, place);
    }

    // Leave the peaks of a range's vectors in the cells if it fits in a tile; otherwise return
    // this thread's part of the peak.
    template <bool SHORT>
    __device__ Peak scan(long long start, long long stop, bool fits) {
        const float* magnitude = task.magnitude ? task.magnitude + start / task.period : nullptr;
        unsigned top = 0;
        double total = 0.0;
        const int count = vectors(start, stop);
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const Place place(start, stop, i);
            Source source;
            load(source, place);
            if (shared.stage.holds(i)) shared.stage.put(i, source);
            float grad[WIDTH], value[WIDTH];
            if (magnitude) {
                blend(source, place, part<float, SHORT>(magnitude, start, place, fits), grad,
                      value);
            } else {
                blend(source, place, Halves<float>(0.0f), grad, value);
            }
            const int offset = (int)(place.element - start);
            if (fits) {
                leave<SHORT>(i, Split(offset, (unsigned)task.period).cut, grad, value);
                continue;
            }
            const Peak peak = peak_of(grad, value, 0, WIDTH);
            top = peak.top > top ? peak.top : top;
            total += peak.total;
        }
        return {top, (float)total};
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
    // block follow each other.
    template <bool SHORT>
    __device__ void leave(int vector, int cut, const float (&grad)[WIDTH],
                          const float (&value)[WIDTH]) {
        if (SHORT) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                shared.cells[vector * WIDTH + j] = peak_of(grad, value, j, j + 1);
            }
        } else {
            shared.cells[vector * 2] = peak_of(grad, value, 0, cut);
            shared.cells[vector * 2 + 1] = peak_of(grad, value, cut, WIDTH);
        }
    }

    // Join each block's cells with as many lanes as are worth it, and settle the block.
    template <bool SHORT>
    __device__ void join(long long start, int blocks) {
        const int period = (int)task.period, lead = (int)(start % WIDTH);
        int lanes = 1;
        while (!SHORT && lanes < WARP && lanes * 4 * WIDTH < period * 2) lanes *= 2;
        const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
#pragma unroll 1
        for (int first = 0; first < blocks; first += THREADS / lanes) {
            const int number = first + group;
            Peak peak = {0, 0.0f};
            if (number < blocks) {
                const int from = lead + number * period, to = from + period;
                const int low = SHORT ? from : from / WIDTH * 2 + (from % WIDTH != 0);
                const int high = SHORT ? to : (to - 1) / WIDTH * 2 + 1;
#pragma unroll 2
                for (int i = low + lane; i < high; i += lanes) {
                    peak = joined(peak, shared.cells[i]);
                }
            }
            peak = joined_lanes(peak, lanes);
            if (number < blocks && lane == 0) {
                const long long block = start / period + number;
                settle(number, block, moments(block), peak, true);
            }
        }
    }

    // Settle the block of an item that does not fit in a tile. `own`: this thread's part of its
    // peak, unless the block is cut in chunks.
    __device__ void settle_long(long long item, long long block, Peak own) {
        const bool cut = task.chunks > 1;
        for (long long i = threadIdx.x; cut && i < task.chunks; i += THREADS) {
            own = joined(own, task.peaks[block * task.chunks + i]);
        }
        const Peak peak = joined_threads(own, shared.warps);
        if (threadIdx.x) return;
        const Moments old = cut ? task.before[block] : moments(block);
        settle(0, block, old, peak, !cut || item % task.chunks == 0);
    }

    template <class Outcomes>
    __device__ void close(const Place& place, const Source& source, const Outcomes& outcomes) {
        float grad[WIDTH], value[WIDTH];
        blend(source, place, outcomes, grad, value);
        Op::apply(shared, place, value, source.grad, outcomes);
    }
};

// Calls `act(item of its task)` for this block's items, with the task in `shared`.
template <class Op, class Act>
__device__ void for_items(Shared<Op>& shared, const Table<Task>& table, long long items, Act act) {
    long long current = -1;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const long long found = table.seek(current < 0 ? 0 : current, item);
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

    template <class Outcomes>
    __device__ static void apply(Shared<Op>& shared, const Place& place, float (&value)[WIDTH],
                                 const Packed& grad, const Outcomes& outcomes) {
        const Task& task = shared.task;
        Packed param;
        if (Op::READS) param.load(task.param, place);  // under way while indices are found
        const bool random = task.flags & STOCHASTIC;
        Bytes index = {0, 0};
        unsigned words[4] = {};
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (random && j % 4 == 0) {
                philox((place.element + j) / 4, task.parameter, task.step, words);
            }
            const float top = outcomes.at(j).top;
            const float x = value[j] / (top == 0.0f ? 1.0f : top);
            unsigned chosen = shared.codebook.nearest(x);
            if (random) chosen = shared.codebook.drawn(x, chosen, uniform(words[j % 4]));
            index.set(j, chosen);
            value[j] = shared.codebook.entry[chosen];
        }
        index.store(task.index, place, task.flags & ALIGNED);
        Op::write(task, place, value, grad, param, outcomes);
    }

    __device__ static void run(const void* memory, long long items) {
        SHARED(Shared<Op>, shared);
        const Table<Task> table(memory);
        shared.codebook.load(table.header->codebook);
        for_items(shared, table, items, [&](long long item) { Walk<Op>(shared).run(item); });
    }
};
