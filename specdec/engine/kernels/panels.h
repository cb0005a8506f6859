// What all products of rows and panels share: where results go, and weights fetched ahead.
//
// Included by `products.h` and `int8_products.h`.

#pragma once

#include "layout.h"

namespace {

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

}  // namespace
