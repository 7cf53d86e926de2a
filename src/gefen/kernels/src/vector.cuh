// Eight consecutive elements at a time: one thread's unit of work.
#pragma once

#include "table.cuh"

#define WIDTH 8

// Where a thread's elements lie: of the eight from `element` on, those from `from` up to `to`
// belong to the item.
struct Place {
    long long element;
    int from, to;

    // Vector `number` of those that cover a range; they begin at multiples of WIDTH.
    __device__ Place(long long start, long long stop, long long number)
        : element(start / WIDTH * WIDTH + number * WIDTH) {
        from = element < start ? (int)(start - element) : 0;
        to = element + WIDTH > stop ? (int)(stop - element) : WIDTH;
    }

    // At most eight elements, from any one on.
    __device__ Place(long long element, long long count)
        : element(element), from(0), to(count < WIDTH ? (int)count : WIDTH) {}

    __device__ bool empty() const { return to <= from; }
    __device__ bool whole() const { return from == 0 && to == WIDTH && element % WIDTH == 0; }
    __device__ bool holds(int j) const { return j >= from && j < to; }
};

// Vectors that an item from `start` to `stop` touches.
__device__ inline int vectors(long long start, long long stop) {
    return (int)((stop + WIDTH - 1) / WIDTH - start / WIDTH);
}

__device__ inline void narrow(int kind, const float (&values)[WIDTH], unsigned (&bits)[WIDTH]) {
    if (kind == BFLOAT16) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) bits[j] = float_to_bfloat(values[j]);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) bits[j] = float_to_half(values[j]);
    }
}

__device__ inline void widen(int kind, const unsigned (&bits)[WIDTH], float (&values)[WIDTH]) {
    if (kind == BFLOAT16) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) values[j] = bfloat_to_float(bits[j]);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) values[j] = half_to_float(bits[j]);
    }
}

// Round to what a tensor of `kind` would hold.
__device__ inline void round_to(int kind, float (&values)[WIDTH]) {
    if (kind == FLOAT32) return;
    unsigned bits[WIDTH];
    narrow(kind, values, bits);
    widen(kind, bits, values);
}

// Steps through a tensor with any strides.
struct Cursor {
    const View& view;
    long long at, column;

    __device__ Cursor(const View& view, long long element) : view(view), at(element), column(0) {
        if (view.inner) {
            column = element % view.inner;
            at = element / view.inner * view.outer_stride + column * view.inner_stride;
        }
    }

    __device__ void advance() {
        if (!view.inner) {
            ++at;
        } else if (++column < view.inner) {
            at += view.inner_stride;
        } else {
            at += view.outer_stride - (view.inner - 1) * view.inner_stride;
            column = 0;
        }
    }

    __device__ unsigned bits() const {
        if (view.kind == FLOAT32) return static_cast<const unsigned*>(view.data)[at];
        return static_cast<const unsigned short*>(view.data)[at];
    }

    __device__ void write(unsigned bits) const {
        if (view.kind == FLOAT32) {
            static_cast<unsigned*>(view.data)[at] = bits;
        } else {
            static_cast<unsigned short*>(view.data)[at] = (unsigned short)bits;
        }
    }
};

// Where eight aligned elements begin.
__device__ inline uint4* vector_at(const View& view, const Place& place) {
    const long long size = view.kind == FLOAT32 ? 4 : 2;
    return reinterpret_cast<uint4*>(static_cast<char*>(view.data) + place.element * size);
}

// Eight elements as they lie in memory: one of 32 bits in each word, or two of 16 bits in each
// of the first four. Those outside of the place are 0.
struct Packed {
    unsigned words[WIDTH];

    __device__ void load(const View& view, const Place& place) {
        if (view.aligned && place.whole()) {
            const uint4* from = vector_at(view, place);
            put(0, from[0]);
            put(4, view.kind == FLOAT32 ? from[1] : make_uint4(0, 0, 0, 0));
            return;
        }
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) words[k] = 0;
        Cursor cursor(view, place.element + place.from);
        // Rolled, with no element of `words` chosen at run time: small, and in registers.
#pragma unroll 1
        for (int j = place.from; j < place.to; ++j) {
            const bool wide = view.kind == FLOAT32;
            const unsigned bits = wide ? cursor.bits() : cursor.bits() << 16 * (j % 2);
            const int home = wide ? j : j / 2;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) words[k] |= k == home ? bits : 0;
            cursor.advance();
        }
    }

    __device__ void unpack(int kind, float (&out)[WIDTH]) const {
        if (kind == FLOAT32) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) out[j] = __uint_as_float(words[j]);
            return;
        }
        unsigned bits[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) bits[j] = words[j / 2] >> 16 * (j % 2) & 0xffffu;
        widen(kind, bits, out);
    }

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

__device__ inline void store(const View& view, const Place& place, const float (&values)[WIDTH]) {
    unsigned bits[WIDTH];
    if (view.kind == FLOAT32) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) bits[j] = __float_as_uint(values[j]);
    } else {
        narrow(view.kind, values, bits);
    }
    if (view.aligned && place.whole()) {
        uint4* to = vector_at(view, place);
        if (view.kind == FLOAT32) {
            to[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
            to[1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
        } else {
            to[0] = make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16,
                               bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
        }
        return;
    }
    Cursor cursor(view, place.element + place.from);
#pragma unroll 1
    for (int j = place.from; j < place.to; ++j) {
        unsigned chosen = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) chosen |= k == j ? bits[k] : 0;
        cursor.write(chosen);
        cursor.advance();
    }
}

// Eight bytes of a contiguous tensor; those outside of the place are 0.
struct Bytes {
    unsigned low, high;

    __device__ void load(const unsigned char* from, const Place& place, bool aligned) {
        from += place.element;
        if (aligned && place.whole()) {
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
        to += place.element;
        if (aligned && place.whole()) {
            *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
            return;
        }
#pragma unroll 1
        for (int j = place.from; j < place.to; ++j) to[j] = (unsigned char)get(j);
    }

    __device__ unsigned get(int j) const { return (j < 4 ? low : high) >> 8 * (j % 4) & 255u; }

    // Of a byte that is 0.
    __device__ void set(int j, unsigned value) { (j < 4 ? low : high) |= value << 8 * (j % 4); }
};
