// Rows times weights in panels: y = or += x W^T + bias, with weights in any `Format`.
//
// Weights of all formats except int8 (`int8_products.h`) are converted to the float32 numbers that they represent while
// they are read: this reads less memory and gives the same bits. Each row goes through the same sums in the same order,
// whatever other rows there are and whichever thread computes a panel. Included by `layer.h`.

#pragma once

#include "int8_products.h"

namespace {

// Rows of one product that share the panel's weights while they are in registers.
constexpr int MAX_ROWS = LANES == 8 ? 6 : 8;  // limited by the sums that fit into 16, or 32, registers

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
    static constexpr int ROWS_TO_ASK = sizeof(Weight) < sizeof(float) ? ROWS_TO_ASK_FOR_SHORT : ROWS_TO_ASK_FOR_FLOAT;

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

// Reads weights of BITS bits with shared scales and offsets (`Format`); rounds once, as the conversion to float32 did.
template <int BITS>
class Scaled {
public:
    static constexpr int ROWS_TO_ASK = ROWS_TO_ASK_FOR_SHORT;

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

// Reads weights of 8 bits with fine scales (`Format`); rounds once, as the conversion to float32 did.
class Fine8 {
public:
    static constexpr int ROWS_TO_ASK = ROWS_TO_ASK_FOR_SHORT;

    Fine8(const Product& product, int64_t panel)
        : from_(static_cast<const int8_t*>(product.weights) + panel * (product.inputs / FINE) * BYTES) {}

    template <bool AHEAD>
    void next(Vector* weights) {
        if (left_ == 0) {
            if constexpr (AHEAD) ask_ahead<BYTES>(from_);
            load_panel(reinterpret_cast<const float*>(from_), scale_);
            from_ += PANEL * sizeof(float);
            left_ = FINE;
        }
        for (int part = 0; part < PANEL_VECTORS; ++part)
            weights[part] = load_signed(from_ + part * LANES) * scale_[part];
        from_ += PANEL;
        --left_;
    }

private:
    static constexpr int64_t BYTES = PANEL * sizeof(float) + FINE * PANEL;

    const int8_t* from_;
    int64_t left_ = 0;
    Vector scale_[PANEL_VECTORS];
};

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

template <class Reader>
void multiply_panel(const Product& product, int64_t panel, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, Into into) {
    while (rows > 0) {
        const int64_t sharing = rows_sharing(rows, MAX_ROWS);
#define SPECDEC_ROWS(n)                                                           \
    if (n <= MAX_ROWS && sharing == n)                                            \
        multiply_rows<n, Reader>(product, panel, x, x_stride, y, y_stride, into); \
    else
        SPECDEC_ROWS(8)
        SPECDEC_ROWS(7)
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_rows<1, Reader>(product, panel, x, x_stride, y, y_stride, into);
#undef SPECDEC_ROWS
        rows -= sharing;
        x += sharing * x_stride;
        y += sharing * y_stride;
    }
}

// y [rows, y_stride] = or += x [rows, x_stride] W^T + bias. Ends with a barrier of all threads.
void apply(const Product& product, const Batch& batch, const float* x, int64_t x_stride, int64_t rows, float* y,
           int64_t y_stride, Into into) {
    const int64_t panels = padded(product.outputs) / PANEL;
    if (product.format != INT8) {
        const auto multiply = product.format == BFLOAT16  ? multiply_panel<Plain<Bfloat16>>
                              : product.format == FLOAT16 ? multiply_panel<Plain<Float16>>
                              : product.format == SCALED4 ? multiply_panel<Scaled<4>>
                              : product.format == SCALED8 ? multiply_panel<Scaled<8>>
                              : product.format == FINE8   ? multiply_panel<Fine8>
                                                          : multiply_panel<Plain<float>>;
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel) multiply(product, panel, x, x_stride, rows, y, y_stride, into);
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
