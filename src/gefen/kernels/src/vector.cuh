// Eight consecutive elements at a time: one thread's unit of work.
#pragma once

#include "table.cuh"

#define WIDTH 8

// Where a thread's elements lie: of the eight from `element` on, those from `from` up to `to`
// belong to the item.
struct Place {
    long long element;
    int from, to;
    bool sure = false;  // whole, of memory that is aligned

    // A whole one.
    __device__ explicit Place(long long element)
        : element(element), from(0), to(WIDTH), sure(true) {}

    // Vector `number` of an item whose elements are those from `lead` up to `size`, counted from
    // `base`, a multiple of WIDTH.
    __device__ Place(long long base, int lead, int size, int number)
        : element(base + (long long)number * WIDTH) {
        from = number ? 0 : lead;
        to = size - number * WIDTH < WIDTH ? size - number * WIDTH : WIDTH;
    }

    // At most eight elements, from any one on.
    __device__ Place(long long element, long long count)
        : element(element), from(0), to(count < WIDTH ? (int)count : WIDTH) {}

    __device__ bool empty() const { return to <= from; }
    __device__ bool whole() const { return from == 0 && to == WIDTH && element % WIDTH == 0; }
    __device__ bool holds(int j) const { return sure || (j >= from && j < to); }
    __device__ bool fast(bool aligned) const { return sure || (aligned && whole()); }
};

// The same number for each of a vector's elements.
struct Lone {
    float value;
    __device__ float operator[](int) const { return value; }
};

// start + weight * (end - start), as torch.lerp computes it.
template <class Starts>
__device__ inline void mix(const Starts& start, const float (&end)[WIDTH], float weight,
                           float (&out)[WIDTH]) {
    if (weight < 0.5f) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[j] = fmaf(weight, end[j] - start[j], start[j]);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[j] = fmaf(weight - 1.0f, end[j] - start[j], end[j]);
    }
}

// Moves each value to the place before it. Loops that work on the first place and turn need no
// index that only run time knows, so that values stay in registers, and are small.
template <class T, int N>
__device__ inline void turn(T (&values)[N], T last) {
#pragma unroll
    for (int j = 1; j < N; ++j) values[j - 1] = values[j];
    values[N - 1] = last;
}

// Steps through a tensor with any strides.
struct Cursor {
    char* at;
    long long step, jump;  // bytes to the next element of a row, and to that of the next row
    int left, row;  // elements of the row to come, and of each; many are as good as all
    int wide;

    __device__ Cursor(const View& view, long long element) {
        wide = view.kind == FLOAT32;
        const long long size = wide ? 4 : 2;
        left = row = 2 * WIDTH;
        step = size;
        jump = 0;
        if (view.inner) {
            const long long line = element / view.inner, column = element - line * view.inner;
            const long long rest = view.inner - column;
            element = line * view.outer_stride + column * view.inner_stride;
            step = view.inner_stride * size;
            jump = (view.outer_stride - (view.inner - 1) * view.inner_stride) * size;
            if (rest < left) left = (int)rest;
            if (view.inner < row) row = (int)view.inner;
        }
        at = static_cast<char*>(view.data) + element * size;
    }

    __device__ void advance() {
        at += --left ? step : jump;
        if (!left) left = row;
        OPAQUE(wide);
    }

    __device__ unsigned read() const {
        if (wide) return *reinterpret_cast<const unsigned*>(at);
        return *reinterpret_cast<const unsigned short*>(at);
    }

    __device__ void write(unsigned bits) const {
        if (wide) {
            *reinterpret_cast<unsigned*>(at) = bits;
        } else {
            *reinterpret_cast<unsigned short*>(at) = (unsigned short)bits;
        }
    }
};

// Where eight aligned elements begin.
__device__ inline uint4* vector_at(const View& view, const Place& place) {
    const long long size = view.kind == FLOAT32 ? 4 : 2;
    char* data = static_cast<char*>(view.data);
    IN_GLOBAL(data);
    return reinterpret_cast<uint4*>(data + place.element * size);
}

// Eight elements as they lie in memory: one of 32 bits in each word, or two of 16 bits in each
// of the first four. Those outside of the place are 0.
struct Packed {
    unsigned words[WIDTH];

    __device__ void load(const View& view, const Place& place) {
        if (place.fast(view.aligned)) {
            const uint4* from = vector_at(view, place);
            put(0, from[0]);
            put(4, view.kind == FLOAT32 ? from[1] : make_uint4(0, 0, 0, 0));
            return;
        }
        // Without a first value, the words would occupy registers from the kernel's start on.
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) words[k] = 0;
        Cursor cursor(view, place.element + place.from);
#pragma unroll 1
        for (int j = 0; j < WIDTH; ++j) {
            const bool held = place.holds(j);
            turn(words, held ? cursor.read() : 0u);
            if (held) cursor.advance();
        }
        if (view.kind == FLOAT32) return;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            words[k] = k < WIDTH / 2 ? words[2 * k] | words[2 * k + 1] << 16 : 0;
        }
    }

    __device__ void store(const View& view, const Place& place) const {
        if (place.fast(view.aligned)) {
            uint4* to = vector_at(view, place);
            to[0] = get(0);
            if (view.kind == FLOAT32) to[1] = get(4);
            return;
        }
        unsigned bits[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            bits[j] = view.kind == FLOAT32 ? words[j] : words[j / 2] >> 16 * (j % 2);
        }
        Cursor cursor(view, place.element + place.from);
#pragma unroll 1
        for (int j = 0; j < place.to; ++j) {
            if (j >= place.from) {
                cursor.write(bits[0]);
                cursor.advance();
            }
            turn(bits, 0u);
        }
    }

    __device__ void unpack(int kind, float (&out)[WIDTH]) const {
        if (kind == FLOAT32) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) out[j] = __uint_as_float(words[j]);
        } else if (kind == BFLOAT16) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) out[j] = bfloat_to_float(half(j));
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) out[j] = half_to_float(half(j));
        }
    }

    __device__ void pack(int kind, const float (&values)[WIDTH]) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) words[k] = __float_as_uint(values[k]);
        if (kind == BFLOAT16) {
#pragma unroll
            for (int k = 0; k < WIDTH / 2; ++k) {
                words[k] = float_to_bfloats(values[2 * k], values[2 * k + 1]);
            }
        } else if (kind == FLOAT16) {
#pragma unroll
            for (int k = 0; k < WIDTH / 2; ++k) {
                words[k] = float_to_halves(values[2 * k], values[2 * k + 1]);
            }
        }
    }

    __device__ unsigned half(int j) const { return words[j / 2] >> 16 * (j % 2) & 0xffffu; }

    __device__ void put(int first, const uint4& source) {
        words[first] = source.x;
        words[first + 1] = source.y;
        words[first + 2] = source.z;
        words[first + 3] = source.w;
    }

    __device__ uint4 get(int first) const {
        return make_uint4(words[first], words[first + 1], words[first + 2], words[first + 3]);
    }
};

// Round to what a tensor of `kind` would hold.
__device__ inline void round_to(int kind, float (&values)[WIDTH]) {
    if (kind == FLOAT32) return;
    Packed packed;
    packed.pack(kind, values);
    packed.unpack(kind, values);
}

__device__ inline void store(const View& view, const Place& place, const float (&values)[WIDTH]) {
    Packed packed;
    packed.pack(view.kind, values);
    packed.store(view, place);
}

// Eight bytes of a contiguous tensor; those outside of the place are 0.
struct Bytes {
    unsigned low, high;

    // Of numbers below 256.
    __device__ static Bytes of(const unsigned (&values)[WIDTH]) {
        unsigned halves[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned* v = values + 4 * k;
            halves[k] = ((v[3] * 256 + v[2]) * 256 + v[1]) * 256 + v[0];
        }
        return {halves[0], halves[1]};
    }

    __device__ void load(const unsigned char* from, const Place& place, bool aligned) {
        IN_GLOBAL(from);
        from += place.element;
        if (place.fast(aligned)) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            low = both.x;
            high = both.y;
            return;
        }
        low = high = 0;
#pragma unroll 1
        for (int j = place.from; j < place.to; ++j) set(j, from[j]);
    }

    __device__ void store(unsigned char* to, const Place& place, bool aligned) const {
        IN_GLOBAL(to);
        to += place.element;
        if (place.fast(aligned)) {
            *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
            return;
        }
#pragma unroll 1
        for (int j = place.from; j < place.to; ++j) to[j] = (unsigned char)get(j);
    }

    __device__ unsigned get(int j) const {
        unsigned value = (j < 4 ? low : high) >> 8 * (j % 4) & 255u;
        OPAQUE(value);
        return value;
    }

    // Of a byte that is 0.
    __device__ void set(int j, unsigned value) { (j < 4 ? low : high) |= value << 8 * (j % 4); }
};
