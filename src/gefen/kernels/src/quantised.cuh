// Steps of a quantised momentum, as far as the kernels share them.
#pragma once

#include "blocks.cuh"

#define TINY 0x1p-126f  // smallest normal number: divisors are not below it
#define LARGEST 0x1.fffffep127f

// p <- p (1 - lr wd), rounded as an operation of its own unless all is rounded at random.
__device__ inline void decay(const Task& task, float (&param)[WIDTH]) {
    if (!(task.flags & DECAYS)) return;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) param[j] *= task.keep;
    if (!(task.flags & ROUNDS)) round_to(task.param.kind, param);
}

// Store a parameter's new values.
__device__ inline void write_param(const Task& task, const Place& place, float (&param)[WIDTH]) {
    if (task.flags & ROUNDS) {
        Words words;
#pragma unroll 1
        for (int j = 0; j < WIDTH; ++j) {
            const unsigned word = words.next(place.element + j + task.offset, !j,
                                             task.round_parameter, task.round_step);
            turn(param, rounded(param[0], word));
        }
    }
    store(task.param, place, param);
}

// What is not below the divisors' least; NaN stays.
__device__ inline float floored(float below) { return below < TINY ? TINY : below; }

// A number within the reach of a step.
__device__ inline float bounded(const Task& task, float move) {
    return fminf(fmaxf(move, -task.reach), task.reach);
}

// Op::write takes the new entries, and what of the outcomes Op::FIELD names.
template <class Op>
struct Quantised {
    struct Memory {};
    static constexpr bool STAGES = true, PLAIN = true;

    __device__ static bool quantised(const Task&) { return true; }

    __device__ static Outcome settle(const Task&, const Moments& old, const Peak& peak,
                                     Moments& fresh) {
        fresh = {__uint_as_float(peak.top), 0.0f};
        return {old.magnitude, fresh.magnitude, 0.0f, 0.0f};
    }

    template <bool PLAIN>
    __device__ static bool apply(const Walk<Op>& walk, const Place& place, const Split& split,
                                 float (&value)[WIDTH]) {
        const Task& task = walk.task;
        const Codebook& codebook = walk.shared.codebook;
        Packed param;
        if (PLAIN && Op::READS) param.load(task.param, place);  // under way while indices are found
        Bytes index = {0, 0};
        if (PLAIN) {
            if (!quick(codebook, walk.shared.outcomes[split.block], value, index)) return false;
        } else {
            float top[WIDTH];
            walk.spread(&Outcome::top, split, top);
            slow(task, codebook, place, value, top, index);
        }
        index.store(task.index, place, task.flags & ALIGNED);
        if (!PLAIN && Op::READS) param.load(task.param, place);
        float factor[WIDTH];
        if (PLAIN) {
            fill(walk.shared.outcomes[split.block].*Op::FIELD, factor);
        } else {
            walk.spread(Op::FIELD, split, factor);
        }
        Op::write(task, place, value, factor, param);
        return true;
    }

    // Each value becomes the entry nearest to value / top, unless that takes more than this.
    __device__ static bool quick(const Codebook& codebook, const Outcome& outcome,
                                 float (&value)[WIDTH], Bytes& index) {
        const float top = outcome.top, inverse = outcome.inverse;
        if (inverse == 0.0f) return false;
        const float rest = fmaf(-inverse, top, 1.0f) * inverse;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) value[j] = quotient(value[j], top, inverse, rest);
        unsigned chosen[WIDTH];
        if (!codebook.nearest(value, chosen)) return false;
        index = Bytes::of(chosen);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) value[j] = codebook.entry[chosen[j]];
        return true;
    }

    // The same one by one, or one of two neighbouring entries at random.
    __device__ static void slow(const Task& task, const Codebook& codebook, const Place& place,
                                float (&value)[WIDTH], float (&top)[WIDTH], Bytes& index) {
        const bool draws = task.flags & STOCHASTIC;
        Words words;
#pragma unroll 1
        for (int j = 0; j < WIDTH; ++j) {
            const float x = value[0] / (top[0] == 0.0f ? 1.0f : top[0]);
            unsigned chosen = codebook.nearest(x);
            if (draws) {
                const unsigned word =
                    words.next(place.element + j + task.offset, !j, task.parameter, task.step);
                chosen = codebook.drawn(x, chosen, uniform(word));
            }
            index.set(j, chosen);
            turn(value, codebook.entry[chosen]);
            turn(top, 0.0f);
        }
    }

    __device__ static void run(const void* memory, long long items) {
        SHARED(Shared<Op>, shared);
        const Table<Task> table(memory);
        shared.codebook.load(table.header->codebook);
        for_items(shared, table, items, [&](unsigned item) { Walk<Op>(shared, item).run(); });
    }
};
