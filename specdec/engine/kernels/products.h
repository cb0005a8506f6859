// Rows times weights in panels: y = or += x W^T + bias, with weights as `Format` has them.
//
// All but int8 become, as they are read, the float32 numbers that they are: less memory, the same bits. A row
// alone and rows in company go through the same sums in the same order, whoever computes which panel. Included by
// `step.cpp`.

#pragma once

#include "layout.h"

namespace {

// Rows of one product that share the panel's weights while they are in registers.
constexpr int MAX_ROWS = LANES == 8 ? 4 : 8;
constexpr int MAX_INT8_ROWS = LANES == 16 ? 6 : 2;  // each keeps two sums

// How far ahead of what is multiplied weights are asked for.
constexpr int PREFETCH_BYTES = 2048;

enum class Into { store, add };

// y = or += result of one row and one vector of outputs.
inline void put(const Product& product, int64_t output, Vector result, float* y, Into into) {
    if (product.bias) result += load(product.bias + output);
    store(y + output, into == Into::add ? load(y + output) + result : result);
}

// Fetches BYTES of what will be read after `from`. One or two rows wait for memory alone, as float32 does in any number,
// and the processor runs ahead by itself; more rows of shorter weights keep it multiplying, and it would ask too late.
template <int BYTES>
inline void ask_ahead(const void* from) {
    for (int at = 0; at < BYTES; at += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + PREFETCH_BYTES + at);
}

static_assert(PANEL_VECTORS == 2, "halves of bytes, and of words, are two vectors");

template <class Weight>
void load_panel(const Weight* from, Vector* weights) {
    for (int part = 0; part < PANEL_VECTORS; ++part) weights[part] = load(from + part * LANES);
}

inline void load_panel(const Bfloat16* from, Vector* weights) { load_paired(from, weights[0], weights[1]); }

// Reads a panel's weights as float32, input by input.
template <class Weight>
class Plain {
public:
    static constexpr bool ASKS_AHEAD = sizeof(Weight) < sizeof(float);

    Plain(const Product& product, int64_t panel)
        : from_(static_cast<const Weight*>(product.weights) + panel * product.inputs * PANEL) {}

    template <bool AHEAD>
    void next(Vector* weights) {
        if constexpr (AHEAD) ask_ahead<PANEL * sizeof(Weight)>(from_);
        load_panel(from_, weights);
        from_ += PANEL;
    }

private:
    const Weight* from_;
};

// The same for weights of BITS bits that share scales and offsets (`Format`): a sum rounded once, as when they were made.
template <int BITS>
class Scaled {
public:
    static constexpr bool ASKS_AHEAD = true;

    Scaled(const Product& product, int64_t panel)
        : from_(static_cast<const uint8_t*>(product.weights) + panel * (product.inputs / SHARED) * BYTES) {}

    template <bool AHEAD>
    void next(Vector* weights) {
        if (left_ == 0) {
            if constexpr (AHEAD) ask_ahead<BYTES>(from_);
            const Float16* scales = reinterpret_cast<const Float16*>(from_);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                scale_[part] = load(scales + part * LANES);
                offset_[part] = load(scales + PANEL + part * LANES);
            }
            from_ += 2 * PANEL * sizeof(Float16);
            left_ = SHARED;
        }
        Vector integers[PANEL_VECTORS];
        if constexpr (BITS == 4)
            load_halves(from_, integers[0], integers[1]);
        else
            for (int part = 0; part < PANEL_VECTORS; ++part)
                integers[part] = load_signed(reinterpret_cast<const int8_t*>(from_) + part * LANES);
        for (int part = 0; part < PANEL_VECTORS; ++part)
            weights[part] = multiply_add(integers[part], scale_[part], offset_[part]);
        from_ += PANEL * BITS / 8;
        --left_;
    }

private:
    static constexpr int64_t BYTES = 2 * PANEL * sizeof(Float16) + SHARED * PANEL * BITS / 8;

    const uint8_t* from_;
    int64_t left_ = 0;
    Vector scale_[PANEL_VECTORS], offset_[PANEL_VECTORS];
};

// ROWS rows of x times one panel. Weights are read once and stay in registers for all rows.
template <int ROWS, class Reader>
void multiply_rows(const Product& product, int64_t panel, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                   Into into) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    Reader reader(product, panel);
    for (int64_t input = 0; input < product.inputs; ++input) {
        Vector weights[PANEL_VECTORS];
        reader.template next<(ROWS > 2) && Reader::ASKS_AHEAD>(weights);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Vector value = broadcast(x[row * x_stride + input]);
            for (int part = 0; part < PANEL_VECTORS; ++part)
                sums[row][part] = multiply_add(value, weights[part], sums[row][part]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part)
            put(product, panel * PANEL + part * LANES, sums[row][part], y + row * y_stride, into);
}

template <class Reader>
void multiply_panel(const Product& product, int64_t panel, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, Into into) {
    while (rows > 0) {
        int done = 1;
#define SPECDEC_ROWS(n)                                                           \
    if (n <= MAX_ROWS && rows >= n) {                                             \
        multiply_rows<n, Reader>(product, panel, x, x_stride, y, y_stride, into); \
        done = n;                                                                 \
    } else
        SPECDEC_ROWS(8)
        SPECDEC_ROWS(7)
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_rows<1, Reader>(product, panel, x, x_stride, y, y_stride, into);
#undef SPECDEC_ROWS
        rows -= done;
        x += done * x_stride;
        y += done * y_stride;
    }
}

// int8 weights are multiplied with rows of 16-bit integers, x = scale * (256 * (high - ZERO) + low), each a byte.
// Processors multiply bytes of 0..255 with bytes of -127..127 and sum four products in one instruction, and sums of
// integers are exact: the same bits on every processor, in any company. The rounding, 1 / 65,024 of a row's largest
// number at most, is finer than that of the weights by far.
constexpr float LARGEST_ROUNDED = 127 * 256;

// x * factor to the nearest integers.
inline Integers rounded(Vector x, float factor) {
    const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return __builtin_convertvector(multiply_add(x, broadcast(factor), magic) - magic, Integers);
}

inline void put_halves(Integers numbers, uint8_t* high, uint8_t* low) {
    const Bytes highs = __builtin_convertvector((numbers >> 8) + ZERO, Bytes);
    const Bytes lows = __builtin_convertvector(numbers & 255, Bytes);
    std::memcpy(high, &highs, sizeof highs);
    std::memcpy(low, &lows, sizeof lows);
}

// A row as integers in whole groups; returns its scale, not a number where an entry is none or infinite.
float round_row(const float* x, int64_t inputs, uint8_t* high, uint8_t* low) {
    Vector most = {}, zeros = {};
    float tail[LANES] = {};  // the last, incomplete vector
    const int64_t whole = inputs / LANES * LANES;
    std::memcpy(tail, x + whole, (inputs - whole) * sizeof(float));
    for (int64_t at = 0; at <= whole; at += LANES) {
        const Vector numbers = load(at < whole ? x + at : tail);
        const Vector sizes = numbers < 0.0f ? -numbers : numbers;
        most = sizes > most ? sizes : most;
        zeros += numbers * 0.0f;
    }
    const float longest = largest(most);
    // Smaller rows count as 0: the inverse of their scale would be infinite.
    const float inverse = longest > 1e-30f ? LARGEST_ROUNDED / longest : 0.0f;
    for (int64_t at = 0; at < whole; at += LANES) put_halves(rounded(load(x + at), inverse), high + at, low + at);
    uint8_t tail_high[LANES], tail_low[LANES];
    put_halves(rounded(load(tail), inverse), tail_high, tail_low);
    std::memcpy(high + whole, tail_high, grouped(inputs) - whole);
    std::memcpy(low + whole, tail_low, grouped(inputs) - whole);
    return longest / LARGEST_ROUNDED + sum(zeros);
}

// sums + the four products of each lane's bytes.
inline Integers dot(Integers sums, Integers bytes, Integers weights) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                          reinterpret_cast<__m512i>(bytes),
                                                          reinterpret_cast<__m512i>(weights)));
#else
    for (int byte = 0; byte < GROUP; ++byte)
        sums += (weights << (24 - 8 * byte) >> 24) * (bytes >> (8 * byte) & 255);
    return sums;
#endif
}

inline Integers broadcast_group(const uint8_t* from) {
    int32_t group;
    std::memcpy(&group, from, sizeof group);
    return group - Integers{};
}

template <int ROWS>
void multiply_int8_rows(const Product& product, int64_t panel, const Batch& batch, int64_t first_row, float* y,
                        int64_t y_stride, Into into) {
    const int64_t stride = grouped(product.inputs);
    const uint8_t *high = batch.high + first_row * stride, *low = batch.low + first_row * stride;
    Integers highs[ROWS][PANEL_VECTORS] = {}, lows[ROWS][PANEL_VECTORS] = {};
    const int8_t* from = static_cast<const int8_t*>(product.weights) + panel * stride * PANEL;
    for (int64_t input = 0; input < stride; input += GROUP, from += PANEL * GROUP) {
        if constexpr (ROWS > 2) ask_ahead<PANEL * GROUP>(from);
        Integers weights[PANEL_VECTORS];
        for (int part = 0; part < PANEL_VECTORS; ++part) weights[part] = load_bytes(from + part * LANES * GROUP);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Integers high_group = broadcast_group(high + row * stride + input);
            const Integers low_group = broadcast_group(low + row * stride + input);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                highs[row][part] = dot(highs[row][part], high_group, weights[part]);
                lows[row][part] = dot(lows[row][part], low_group, weights[part]);
            }
        }
    }
    // Unrolled, here and where rows of floats end, for the sums to stay in registers before.
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            const int64_t output = panel * PANEL + part * LANES;
            const Integers high_sum = highs[row][part] - load(product.offsets + output);
            const Vector sum = __builtin_convertvector(high_sum, Vector) * 256.0f +
                               __builtin_convertvector(lows[row][part], Vector);
            const Vector scales = load(product.scales + output) * batch.row_scales[first_row + row];
            put(product, output, sum * scales, y + row * y_stride, into);
        }
}

void multiply_int8_panel(const Product& product, int64_t panel, const Batch& batch, int64_t rows, float* y,
                         int64_t y_stride, Into into) {
    for (int64_t row = 0; row < rows;) {
        int done = 1;
        float* to = y + row * y_stride;
#define SPECDEC_ROWS(n)                                                          \
    if (n <= MAX_INT8_ROWS && rows - row >= n) {                                 \
        multiply_int8_rows<n>(product, panel, batch, row, to, y_stride, into);   \
        done = n;                                                                \
    } else
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_int8_rows<1>(product, panel, batch, row, to, y_stride, into);
#undef SPECDEC_ROWS
        row += done;
    }
}

// y [rows, y_stride] = or += x [rows, x_stride] W^T + bias. Ends with all threads together.
void apply(const Product& product, const Batch& batch, const float* x, int64_t x_stride, int64_t rows, float* y,
           int64_t y_stride, Into into) {
    const int64_t panels = padded(product.outputs) / PANEL;
    if (product.format != INT8) {
        const auto multiply = product.format == BFLOAT16  ? multiply_panel<Plain<Bfloat16>>
                              : product.format == FLOAT16 ? multiply_panel<Plain<Float16>>
                              : product.format == SCALED4 ? multiply_panel<Scaled<4>>
                              : product.format == SCALED8 ? multiply_panel<Scaled<8>>
                                                          : multiply_panel<Plain<float>>;
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel) multiply(product, panel, x, x_stride, rows, y, y_stride, into);
        return;
    }
    const int64_t stride = grouped(product.inputs);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        batch.row_scales[row] =
            round_row(x + row * x_stride, product.inputs, batch.high + row * stride, batch.low + row * stride);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        multiply_int8_panel(product, panel, batch, rows, y, y_stride, into);
}

}  // namespace
