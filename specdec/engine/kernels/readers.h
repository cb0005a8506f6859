// Readers of a panel's weights, input by input, for each `Format` except INT8.
//
// Readers of plain weights give the float32 numbers that the weights represent. Readers of blocks give their integers,
// and the scales and offsets that many inputs share. Included by `products.h`.

#pragma once

#include "panels.h"

namespace {

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
    static constexpr bool IS_BLOCK = false;
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

// Scales and offsets in binary16, of SHARED inputs.
class SharedScales {
public:
    static constexpr int64_t INPUTS = SHARED;  // inputs with the same scale
    static constexpr int64_t BYTES = 4 * PANEL;  // of the scales of that many inputs, on average

    // Reads the next scales of a panel and returns the address behind them.
    const uint8_t* next(const uint8_t* from, Vector* scale, Vector* offset) {
        const Float16* scales = reinterpret_cast<const Float16*>(from);
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            scale[part] = load(scales + part * LANES);
            offset[part] = load(scales + PANEL + part * LANES);
        }
        return from + 4 * PANEL;
    }
};

// Unsigned bytes, times a factor in binary16 that SUPER inputs share: scales and, with other factors, the offsets, of
// SHARED inputs. The products are exact.
class SuperScales {
public:
    static constexpr int64_t INPUTS = SHARED;
    static constexpr int64_t BYTES = 2 * PANEL + 4 * PANEL * INPUTS / SUPER;

    const uint8_t* next(const uint8_t* from, Vector* scale, Vector* offset) {
        if (left_ == 0) {
            const Float16* factors = reinterpret_cast<const Float16*>(from);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                of_scales_[part] = load(factors + part * LANES);
                of_offsets_[part] = -load(factors + PANEL + part * LANES);
            }
            from += 4 * PANEL;
            left_ = SUPER;
        }
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            scale[part] = of_scales_[part] * as_floats(load_unsigned(from + part * LANES));
            offset[part] = of_offsets_[part] * as_floats(load_unsigned(from + PANEL + part * LANES));
        }
        left_ -= INPUTS;
        return from + 2 * PANEL;
    }

private:
    int64_t left_ = 0;
    Vector of_scales_[PANEL_VECTORS], of_offsets_[PANEL_VECTORS];
};

// Signed bytes of FINE inputs, times a factor in binary16 that SUPER inputs share. The integer CENTRE stands for 0.
class FineScales {
public:
    static constexpr int64_t INPUTS = FINE;
    static constexpr int64_t BYTES = PANEL + 2 * PANEL * INPUTS / SUPER;

    const uint8_t* next(const uint8_t* from, Vector* scale, Vector* offset) {
        if (left_ == 0) {
            for (int part = 0; part < PANEL_VECTORS; ++part)
                factors_[part] = load(reinterpret_cast<const Float16*>(from) + part * LANES);
            from += 2 * PANEL;
            left_ = SUPER;
        }
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            scale[part] = factors_[part] * load_signed(reinterpret_cast<const int8_t*>(from) + part * LANES);
            offset[part] = scale[part] * -CENTRE;
        }
        left_ -= INPUTS;
        return from + PANEL;
    }

private:
    int64_t left_ = 0;
    Vector factors_[PANEL_VECTORS];
};

class SignedBytes {
public:
    static constexpr int64_t BYTES = PANEL;  // of an input

    // Reads the integers of one input and returns the address behind them.
    const uint8_t* next(const uint8_t* from, Vector* integers) {
        for (int part = 0; part < PANEL_VECTORS; ++part)
            integers[part] = load_signed(reinterpret_cast<const int8_t*>(from) + part * LANES);
        return from + PANEL;
    }
};

// Unsigned integers of 4 + MORE bits: half bytes, the low ones of the panel's first outputs. The MORE upper bits of
// 4 / MORE inputs are a byte of each lane in front of their half bytes, those of the first input lowest.
template <int MORE>
class HalfBytes {
public:
    static constexpr int64_t BYTES = PANEL / 2 + PANEL * MORE / 8;

    const uint8_t* next(const uint8_t* from, Vector* integers) {
        if constexpr (MORE > 0) {
            if (left_ == 0) {
                more_ = load_unsigned(from) << 4;
                from += LANES;
                left_ = 4 / MORE;
            }
            --left_;
        }
        const Integers bytes = load_unsigned(from);
        if constexpr (MORE > 0) {
            constexpr int mask = ((1 << MORE) - 1) << 4;
            integers[0] = as_floats((bytes & 15) | (more_ & mask));
            integers[1] = as_floats((bytes >> 4) | ((more_ >> MORE) & mask));
            more_ >>= 2 * MORE;
        } else {
            integers[0] = lowest_bits(bytes);
            integers[1] = lowest_bits(bytes >> 4);
        }
        return from + LANES;
    }

private:
    int left_ = 0;
    Integers more_;
};

// Reads a panel's blocks of `Scales::INPUTS` inputs with the same scale and offset.
template <class Scales, class Codes>
class Blocks {
public:
    static constexpr bool IS_BLOCK = true;
    static constexpr int64_t INPUTS = Scales::INPUTS;
    static constexpr int64_t BYTES = Scales::BYTES + INPUTS * Codes::BYTES;

    struct Block {
        Vector scale[PANEL_VECTORS], offset[PANEL_VECTORS];
        const uint8_t* from;
        Codes codes;

        void next_integers(Vector* integers) { from = codes.next(from, integers); }
    };

    Blocks(const Product& product, int64_t panel)
        : from_(static_cast<const uint8_t*>(product.weights) + panel * (product.inputs / INPUTS) * BYTES) {}

    void next(Block& block) {
        ask_ahead<BYTES>(from_);
        block.from = scales_.next(from_, block.scale, block.offset);
        from_ = block.from + INPUTS * Codes::BYTES;
    }

private:
    const uint8_t* from_;
    Scales scales_;
};

// Reads weights of 8 bits with fine scales (`Format`); rounds once, as the conversion to float32 did.
class Fine8 {
public:
    static constexpr bool IS_BLOCK = false;
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

}  // namespace
