// Rows of a GGUF file, which consist of blocks: their conversion to float32, and their packing into panels.
//
// Packing moves integers, scales and offsets and rounds nothing, so a panel takes about as many bytes as its rows took in
// the file. Included by `layer.h` and `step.cpp`.
//
// Source: the layouts of blocks are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#pragma once

#include "layout.h"

namespace {

// How a tensor is stored, by ggml's numbers; `specdec.checkpoints.gguf.file.KINDS`.
enum Kind : int64_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, BF16 = 30
};

// A block, or SUPER inputs of a row of shorter blocks, taken apart in the way of its `Format`.
struct Parts {
    uint8_t integers[SUPER];  // signed ones in two's complement
    uint16_t factors[2];      // SUPER formats, in binary16: factors of scales and of offsets
    uint8_t scales[SUPER / FINE];
    uint8_t offsets[SUPER / SHARED];
    uint16_t shared[SUPER / SHARED][2];  // SCALED formats, in binary16: scale and offset
};

// The format that holds the blocks of a kind, their inputs and their bytes.
struct Held {
    Format format;
    int inputs;
    int bytes;
};

inline Held held_in(int64_t kind) {
    switch (kind) {
        case Q4_0: return {SCALED4, 32, 18};
        case Q4_1: return {SCALED4, 32, 20};
        case Q5_0: return {SCALED5, 32, 22};
        case Q5_1: return {SCALED5, 32, 24};
        case Q8_0: return {SCALED8, 32, 34};
        case IQ4_NL: return {SCALED8, 32, 18};
        case Q3_K: return {SUPER6, 256, 110};
        case Q4_K: return {SUPER4, 256, 144};
        case Q5_K: return {SUPER5, 256, 176};
        case Q6_K: return {SUPER6, 256, 210};
        default: return {FLOAT32, 0, 0};
    }
}

inline uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return half;
}

inline float of_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
    const float size = rest < 0x7c00u << 13 ? float_of(rest) * 0x1p112f : float_of(rest | 0x7f800000u);
    return sign ? -size : size;
}

// Returns -2^exponent times a binary16 number. It is infinite if no binary16 number is that; `overflows` tells.
inline uint16_t minus_times_power(uint16_t half, int exponent) {
    const uint16_t sign = (half & 0x8000u) ^ 0x8000u;
    uint32_t size = half & 0x7fffu;
    for (; exponent > 0; --exponent) size = size < 0x400u ? 2 * size : size + 0x400u;
    return sign | (size < 0x7c00u ? size : 0x7c00u);
}

inline void take_half_bytes(const uint8_t* from, int num_bytes, uint8_t* to) {
    for (int at = 0; at < num_bytes; ++at) {
        to[at] = from[at] & 15;
        to[at + num_bytes] = from[at] >> 4;
    }
}

// The scales and offsets of 6 bits of Q4_K and Q5_K.
inline void take_scales(const uint8_t* from, Parts& parts) {
    for (int at = 0; at < 4; ++at) {
        parts.scales[at] = from[at] & 63;
        parts.offsets[at] = from[at + 4] & 63;
        parts.scales[at + 4] = (from[at + 8] & 15) | (from[at] >> 6 << 4);
        parts.offsets[at + 4] = (from[at + 8] >> 4) | (from[at + 4] >> 6 << 4);
    }
}

// Values of the half bytes of IQ4_NL.
constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Takes the block of SHARED inputs apart that is number `at` of the SUPER inputs.
inline void take_short(int64_t kind, const uint8_t* from, int at, Parts& parts) {
    uint8_t* integers = parts.integers + at * SHARED;
    uint16_t *scale = &parts.shared[at][0], *offset = &parts.shared[at][1];
    *scale = half_at(from);
    *offset = 0;
    from += 2;
    if (kind == Q4_1 || kind == Q5_1) {
        *offset = half_at(from);
        from += 2;
    }
    if (kind == Q4_0) *offset = minus_times_power(*scale, 3);
    if (kind == Q5_0) *offset = minus_times_power(*scale, 4);
    if (kind == Q8_0) {
        std::memcpy(integers, from, SHARED);
        return;
    }
    const bool has_fifth_bit = kind == Q5_0 || kind == Q5_1;
    take_half_bytes(from + 4 * has_fifth_bit, SHARED / 2, integers);
    uint32_t fifth = 0;
    if (has_fifth_bit) std::memcpy(&fifth, from, sizeof fifth);
    for (int input = 0; input < SHARED; ++input) integers[input] |= (fifth >> input & 1) << 4;
    if (kind == IQ4_NL)
        for (int input = 0; input < SHARED; ++input) integers[input] = static_cast<uint8_t>(UNEVEN[integers[input]]);
}

inline void take_q3(const uint8_t* from, Parts& parts) {
    const uint8_t *third = from, *two = from + 32, *scales = from + 96;
    for (int input = 0; input < SUPER; ++input) {
        const int in_half = input % 128, low = two[input / 128 * 32 + in_half % 32] >> (in_half / 32 * 2) & 3;
        const int bit = third[input % 32] >> (input / 32) & 1;
        parts.integers[input] = CENTRE + low - (bit ? 0 : 4);
    }
    for (int at = 0; at < 16; ++at) {
        const int low = at < 8 ? scales[at] & 15 : scales[at - 8] >> 4;
        parts.scales[at] = static_cast<uint8_t>((low | (scales[8 + at % 4] >> (at / 4 * 2) & 3) << 4) - 32);
    }
    parts.factors[0] = half_at(from + 108);
}

inline void take_q45(const uint8_t* from, bool has_fifth_bit, Parts& parts) {
    parts.factors[0] = half_at(from);
    parts.factors[1] = half_at(from + 2);
    take_scales(from + 4, parts);
    const uint8_t *fifth = from + 16, *halves = fifth + 32 * has_fifth_bit;
    for (int at = 0; at < 4; ++at) take_half_bytes(halves + at * 32, 32, parts.integers + at * 64);
    if (has_fifth_bit)
        for (int input = 0; input < SUPER; ++input)
            parts.integers[input] |= (fifth[input % 32] >> (input / 32) & 1) << 4;
}

inline void take_q6(const uint8_t* from, Parts& parts) {
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = from + half * 64, *high = from + 128 + half * 32;
        uint8_t* integers = parts.integers + half * 128;
        for (int at = 0; at < 32; ++at) {
            integers[at] = (low[at] & 15) | (high[at] & 3) << 4;
            integers[at + 32] = (low[at + 32] & 15) | (high[at] >> 2 & 3) << 4;
            integers[at + 64] = low[at] >> 4 | (high[at] >> 4 & 3) << 4;
            integers[at + 96] = low[at + 32] >> 4 | high[at] >> 6 << 4;
        }
    }
    std::memcpy(parts.scales, from + 192, 16);
    parts.factors[0] = half_at(from + 208);
}

// Takes the inputs of a row from `input` on apart, at most SUPER.
inline void take_apart(int64_t kind, const uint8_t* row, int64_t input, int64_t inputs, Parts& parts) {
    const Held held = held_in(kind);
    const uint8_t* from = row + input / held.inputs * held.bytes;
    switch (kind) {
        case Q3_K: return take_q3(from, parts);
        case Q4_K: return take_q45(from, false, parts);
        case Q5_K: return take_q45(from, true, parts);
        case Q6_K: return take_q6(from, parts);
        default:
            for (int at = 0; at < SUPER / SHARED && input + at * SHARED < inputs; ++at)
                take_short(kind, from + at * held.bytes, at, parts);
    }
}

// Writes `count` integers as numbers: scale * integer + offset. The products are exact in float32.
template <class Integer>
inline void put_scaled(const uint8_t* integers, int count, float scale, float offset, float* to) {
    for (int input = 0; input < count; ++input)
        to[input] = scale * static_cast<float>(static_cast<Integer>(integers[input])) + offset;
}

// Returns the integer of a kind that stands for 0, if the kind stores no offset for it.
inline int zero_of(int64_t kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : 0; }

// Writes the numbers that the parts represent.
inline void put_numbers(int64_t kind, const Parts& parts, int64_t count, float* to) {
    const Format format = held_in(kind).format;
    const int zero = zero_of(kind);
    if (format == SUPER6) {
        const float factor = of_half(parts.factors[0]);
        for (int64_t input = 0; input < count; input += FINE) {
            const float scale = factor * static_cast<int8_t>(parts.scales[input / FINE]);
            put_scaled<uint8_t>(parts.integers + input, FINE, scale, -CENTRE * scale, to + input);
        }
        return;
    }
    const float of_scales = of_half(parts.factors[0]), of_offsets = of_half(parts.factors[1]);
    for (int64_t input = 0; input < count; input += SHARED) {
        const int64_t at = input / SHARED;
        if (format == SUPER4 || format == SUPER5)
            put_scaled<uint8_t>(parts.integers + input, SHARED, of_scales * parts.scales[at],
                                -of_offsets * parts.offsets[at], to + input);
        else if (format == SCALED8)
            put_scaled<int8_t>(parts.integers + input, SHARED, of_half(parts.shared[at][0]), 0.0f, to + input);
        else if (zero)  // in float32, because binary16 does not hold every offset
            put_scaled<uint8_t>(parts.integers + input, SHARED, of_half(parts.shared[at][0]),
                                -zero * of_half(parts.shared[at][0]), to + input);
        else
            put_scaled<uint8_t>(parts.integers + input, SHARED, of_half(parts.shared[at][0]),
                                of_half(parts.shared[at][1]), to + input);
    }
}

// Writes a row of a GGUF file as float32.
inline void put_row(int64_t kind, const uint8_t* row, int64_t inputs, float* to) {
    if (kind == F32) {
        std::memcpy(to, row, inputs * sizeof(float));
        return;
    }
    if (kind == F16 || kind == BF16) {
        for (int64_t at = 0; at < inputs; ++at) {
            const uint16_t half = half_at(row + 2 * at);
            to[at] = kind == F16 ? of_half(half) : float_of(static_cast<uint32_t>(half) << 16);
        }
        return;
    }
    for (int64_t input = 0; input < inputs; input += SUPER) {
        Parts parts;
        take_apart(kind, row, input, inputs, parts);
        put_numbers(kind, parts, inputs - input < SUPER ? inputs - input : SUPER, to + input);
    }
}

// Returns whether an offset of a row's block is too large for binary16, although its scale is not.
inline bool overflows(int64_t kind, const Parts& parts, int64_t count) {
    if (!zero_of(kind)) return false;
    for (int64_t at = 0; at < count / SHARED; ++at)
        if ((parts.shared[at][0] & 0x7c00u) != 0x7c00u && (parts.shared[at][1] & 0x7c00u) == 0x7c00u) return true;
    return false;
}

inline uint8_t* put_halves(const Parts* rows, uint16_t (*half)(const Parts&, int), int at, uint8_t* to) {
    for (int lane = 0; lane < PANEL; ++lane, to += 2) {
        const uint16_t bits = half(rows[lane], at);
        std::memcpy(to, &bits, sizeof bits);
    }
    return to;
}

// Number of upper bits that a format keeps apart from half bytes.
inline int num_upper_bits(Format format) {
    return format == SUPER6 ? 2 : format == SCALED5 || format == SUPER5 ? 1 : 0;
}

// Writes the integers of a panel's inputs from `begin` to `end` (`HalfBytes` and `SignedBytes` in `readers.h`).
inline uint8_t* put_integers(Format format, const Parts* rows, int begin, int end, uint8_t* to) {
    if (format == SCALED8) {
        for (int input = begin; input < end; ++input)
            for (int lane = 0; lane < PANEL; ++lane) *to++ = rows[lane].integers[input];
        return to;
    }
    const int more = num_upper_bits(format), together = more ? 4 / more : end - begin;
    for (int first = begin; first < end; first += together) {
        if (more)
            for (int lane = 0; lane < LANES; ++lane) {
                uint8_t upper = 0;
                for (int at = 0; at < together; ++at) {
                    upper |= rows[lane].integers[first + at] >> 4 << (2 * more * at);
                    upper |= rows[lane + LANES].integers[first + at] >> 4 << (2 * more * at + more);
                }
                *to++ = upper;
            }
        for (int input = first; input < first + together; ++input)
            for (int lane = 0; lane < LANES; ++lane)
                *to++ = (rows[lane].integers[input] & 15) | rows[lane + LANES].integers[input] << 4;
    }
    return to;
}

// Writes the first `count` inputs of a panel's taken rows.
inline uint8_t* put_panel(Format format, const Parts* rows, int64_t count, uint8_t* to) {
    const auto factor = [](const Parts& row, int at) { return row.factors[at]; };
    const auto shared = [](const Parts& row, int at) { return row.shared[at / 2][at % 2]; };
    const bool is_super = format == SUPER4 || format == SUPER5;
    if (is_super || format == SUPER6) to = put_halves(rows, factor, 0, to);
    if (is_super) to = put_halves(rows, factor, 1, to);
    const int step = format == SUPER6 ? FINE : SHARED;
    for (int begin = 0; begin < count; begin += step) {
        if (is_super || format == SUPER6) {
            for (int lane = 0; lane < PANEL; ++lane) *to++ = rows[lane].scales[begin / step];
            if (is_super)
                for (int lane = 0; lane < PANEL; ++lane) *to++ = rows[lane].offsets[begin / step];
        } else {
            to = put_halves(rows, shared, begin / step * 2, to);
            to = put_halves(rows, shared, begin / step * 2 + 1, to);
        }
        to = put_integers(format, rows, begin, begin + step, to);
    }
    return to;
}

}  // namespace
