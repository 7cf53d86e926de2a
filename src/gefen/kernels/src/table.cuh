// The tables that launch.py writes: what a launch works on, and how its items are cut.
//
// A table is a header, for each task the number of items up to its end, and the tasks.
#pragma once

#include "platform.cuh"

enum Kind { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// A tensor's elements, counted row-major.
struct View {
    void* data;
    long long inner;  // elements of a row; 0 where the tensor is contiguous
    long long outer_stride, inner_stride;  // in elements
    int kind;
    int aligned;  // contiguous, and eight elements may be moved at a time
};

// The largest magnitude (its bits) and the sum of squares of some elements, which are multiplied by
// a power of two, so that the sum overflows only where the mean would.
struct Peak {
    unsigned top;
    float total;
};

// A block's state.
struct Moments {
    float magnitude, v;
};

enum Flags { NESTEROV = 1, STOCHASTIC = 2, ALIGNED = 4, DECAYS = 8, ROUNDS = 16 };

// One parameter's momentum and what is made of it. Pointers that a kernel does not use are null.
struct Task {
    View grad;
    View param;  // or the dense direction, which is written only
    unsigned char* index;
    float* magnitude;
    float* v;
    const float* row_root;
    const float* column_root;
    Peak* peaks;  // of every chunk
    Moments* before;  // of every block that is cut in chunks
    long long n, period;
    long long span;  // elements of an item: whole blocks, or a chunk of one
    long long chunks;  // items of a block that is cut; 1 where items are whole blocks
    long long columns;
    long long offset;  // of its first element within the parameter whose random numbers it draws
    unsigned long long step, parameter;  // what random numbers depend on
    unsigned long long round_step, round_parameter;  // and those that parameters are rounded by
    float mix;  // 1 - beta
    float beta2, share;  // share: (1 - beta2) times what makes a mean of a peak's total
    float root2, eps;  // root2: root of the second moment's bias correction
    float rate;  // lr / first moment's bias correction, negative where a step maximises
    float reach;  // what one element moves at most
    float keep;  // 1 - lr * weight_decay
    float scale, rest;  // powers of two: of squares before they are added, and of sums of many
    int flags;
};

// One matrix whose second moment is factored.
struct Factors {
    View grad;
    float *row, *column;  // EMAs of the means of squares, [rows] and [columns]
    float *row_root, *column_root;  // roots of the factors of the second moment
    float *row_parts, *column_parts;  // sums of squares: [rows, strips] and [panels, columns]
    const float* column_mean;  // of squares, if other rows count as well: [columns]
    long long rows, columns;
    long long strips, panels;
    float beta2, row_share, column_share, correction2;
    float scale;  // a power of two: of squares before they are added
};

struct Header {
    long long tasks;
    const unsigned* codebook;
    unsigned long long* counts;
};

template <class T>
struct Table {
    const Header* header;
    const long long* ends;
    const T* tasks;

    __device__ explicit Table(const void* memory)
        : header(static_cast<const Header*>(memory)),
          ends(reinterpret_cast<const long long*>(header + 1)),
          tasks(reinterpret_cast<const T*>(ends + header->tasks)) {}

    // The task that holds an item, at or after task `from`. All threads call it together.
    __device__ int seek(int from, long long item) const {
        for (;;) {
            const int at = from + threadIdx.x;
            const int passed = __syncthreads_count(at < header->tasks && ends[at] <= item);
            from += passed;
            if (passed < THREADS) return from;
        }
    }

    __device__ long long first(int task) const { return task ? ends[task - 1] : 0; }
};
