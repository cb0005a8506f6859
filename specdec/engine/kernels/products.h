// Rows times weights in panels: y = or += x W^T + bias, with weights in any `Format`.
//
// Weights of all formats except int8 (`int8_products.h`) are converted to the float32 numbers that they represent while
// they are read: this reads less memory and gives the same bits. Each row goes through the same sums in the same order,
// whatever other rows there are and whichever thread computes a panel. Included by `layer.h`.

#pragma once

#include "int8_products.h"
#include "readers.h"

namespace {

// Rows of one product that share the panel's weights while they are in registers.
constexpr int MAX_ROWS = LANES == 8 ? 6 : 8;  // limited by the sums that fit into 16, or 32, registers

// Rows of x, and the sums of each FINE inputs of them, [count, inputs / FINE], which blocks need.
struct Rows {
    const float* x;
    int64_t stride;
    const float* sums;
    int64_t count;

    void skip(int64_t some, int64_t inputs) {
        x += some * stride;
        sums += some * (inputs / FINE);
        count -= some;
    }
};

// Writes the sums of each FINE inputs of a row. The order of the additions is the same for each width of vectors.
inline void put_sums_of_x(const float* x, int64_t inputs, float* to) {
    for (int64_t at = 0; at < inputs; at += FINE) {
        float pairs[FINE / 2];
        for (int i = 0; i < 8; ++i) pairs[i] = x[at + i] + x[at + i + 8];
        for (int half = 4; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) pairs[i] += pairs[i + half];
        *to++ = pairs[0];
    }
}

// ROWS rows of x times one panel. Weights are read once and stay in registers for all rows.
template <int ROWS, class Reader>
void multiply_rows(const Product& product, int64_t panel, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                   Into into) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    Reader reader(product, panel);
    for (int64_t input = 0; input < product.inputs; ++input) {
        Vector weights[PANEL_VECTORS];
        reader.template next<(ROWS >= Reader::ROWS_TO_ASK)>(weights);
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

// Number of blocks that are multiplied at once: a single row would wait for each of its sums.
template <int ROWS>
constexpr int TOGETHER = ROWS == 1 ? 2 : 1;

// Multiplies SOME blocks, which begin at input `begin`. A block's integers are multiplied and summed first; then the sum
// is scaled, and the offset times the sum of the block's x is added.
template <int SOME, int ROWS, class Reader>
[[gnu::always_inline]] inline void add_blocks(const Product& product, Reader& reader, int64_t begin, const Rows& rows,
                                              Vector (&sums)[ROWS][PANEL_VECTORS]) {
    Vector products[SOME][ROWS][PANEL_VECTORS] = {};
    typename Reader::Block blocks[SOME];
#pragma GCC unroll 4
    for (int block = 0; block < SOME; ++block) reader.next(blocks[block]);
    for (int64_t input = 0; input < Reader::INPUTS; ++input) {
#pragma GCC unroll 4
        for (int block = 0; block < SOME; ++block) {
            Vector integers[PANEL_VECTORS];
            blocks[block].next_integers(integers);
            const float* x = rows.x + begin + block * Reader::INPUTS + input;
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const Vector value = broadcast(x[row * rows.stride]);
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    products[block][row][part] = multiply_add(value, integers[part], products[block][row][part]);
            }
        }
    }
#pragma GCC unroll 4
    for (int block = 0; block < SOME; ++block)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const float* of_row = rows.sums + row * (product.inputs / FINE) + (begin + block * Reader::INPUTS) / FINE;
            const Vector sum_of_x = broadcast(Reader::INPUTS == FINE ? of_row[0] : of_row[0] + of_row[1]);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                const Vector scaled =
                    multiply_add(products[block][row][part], blocks[block].scale[part], sums[row][part]);
                sums[row][part] = multiply_add(sum_of_x, blocks[block].offset[part], scaled);
            }
        }
}

template <int ROWS, class Reader>
void multiply_blocks(const Product& product, int64_t panel, const Rows& rows, float* y, int64_t y_stride, Into into) {
    constexpr int SOME = TOGETHER<ROWS>;
    Vector sums[ROWS][PANEL_VECTORS] = {};
    Reader reader(product, panel);
    int64_t begin = 0;
    for (; begin + SOME * Reader::INPUTS <= product.inputs; begin += SOME * Reader::INPUTS)
        add_blocks<SOME>(product, reader, begin, rows, sums);
    for (; begin < product.inputs; begin += Reader::INPUTS) add_blocks<1>(product, reader, begin, rows, sums);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part)
            put(product, panel * PANEL + part * LANES, sums[row][part], y + row * y_stride, into);
}

template <int ROWS, class Reader>
void multiply_some(const Product& product, int64_t panel, const Rows& rows, float* y, int64_t y_stride, Into into) {
    if constexpr (Reader::IS_BLOCK)
        multiply_blocks<ROWS, Reader>(product, panel, rows, y, y_stride, into);
    else
        multiply_rows<ROWS, Reader>(product, panel, rows.x, rows.stride, y, y_stride, into);
}

template <class Reader>
void multiply_panel(const Product& product, int64_t panel, Rows rows, float* y, int64_t y_stride, Into into) {
    while (rows.count > 0) {
        const int64_t sharing = rows_sharing(rows.count, MAX_ROWS);
#define SPECDEC_ROWS(n)                                                    \
    if (n <= MAX_ROWS && sharing == n)                                     \
        multiply_some<n, Reader>(product, panel, rows, y, y_stride, into); \
    else
        SPECDEC_ROWS(8)
        SPECDEC_ROWS(7)
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_some<1, Reader>(product, panel, rows, y, y_stride, into);
#undef SPECDEC_ROWS
        rows.skip(sharing, product.inputs);
        y += sharing * y_stride;
    }
}

typedef void (*MultiplyPanel)(const Product&, int64_t, Rows, float*, int64_t, Into);

inline MultiplyPanel multiply_of(int64_t format) {
    switch (format) {
        case BFLOAT16: return multiply_panel<Plain<Bfloat16>>;
        case FLOAT16: return multiply_panel<Plain<Float16>>;
        case SCALED4: return multiply_panel<Blocks<SharedScales, HalfBytes<0>>>;
        case SCALED5: return multiply_panel<Blocks<SharedScales, HalfBytes<1>>>;
        case SCALED8: return multiply_panel<Blocks<SharedScales, SignedBytes>>;
        case SUPER4: return multiply_panel<Blocks<SuperScales, HalfBytes<0>>>;
        case SUPER5: return multiply_panel<Blocks<SuperScales, HalfBytes<1>>>;
        case SUPER6: return multiply_panel<Blocks<FineScales, HalfBytes<2>>>;
        case FINE8: return multiply_panel<Fine8>;
        default: return multiply_panel<Plain<float>>;
    }
}

// Returns whether a part of a product needs the sums of x.
inline bool has_blocks(const Product& product) {
    switch (product.format) {
        case SCALED4: case SCALED5: case SCALED8: case SUPER4: case SUPER5: case SUPER6: return true;
        default: return product.rest && has_blocks(*product.rest);
    }
}

// Multiplies by one panel of a product, whose outputs may have several formats.
inline void multiply_one(const Product& product, int64_t panel, const Rows& rows, float* y, int64_t y_stride, Into into) {
    if (product.rest && panel * PANEL >= product.rest_from)
        return multiply_one(*product.rest, panel - product.rest_from / PANEL, rows, y + product.rest_from, y_stride, into);
    multiply_of(product.format)(product, panel, rows, y, y_stride, into);
}

// y [rows, y_stride] = or += x [rows, x_stride] W^T + bias. Ends with a barrier of all threads.
void apply(const Product& product, const Batch& batch, const float* x, int64_t x_stride, int64_t rows, float* y,
           int64_t y_stride, Into into) {
    const int64_t panels = padded(product.outputs) / PANEL;
    if (product.format != INT8) {
        float* sums = reinterpret_cast<float*>(batch.integers);
        if (has_blocks(product)) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row)
                put_sums_of_x(x + row * x_stride, product.inputs, sums + row * (product.inputs / FINE));
        }
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel)
            multiply_one(product, panel, {x, x_stride, sums, rows}, y, y_stride, into);
        return;
    }
    const int64_t stride = grouped(product.inputs);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        batch.row_scales[row] = round_row(x + row * x_stride, product.inputs, batch.integers + row * 2 * stride);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        multiply_int8_panel(product, panel, batch, rows, y, y_stride, into);
}

}  // namespace
