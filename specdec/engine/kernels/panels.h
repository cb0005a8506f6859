// What all products of rows and panels share: where results go, and weights fetched ahead.
//
// Included by `products.h` and `int8_products.h`.

#pragma once

#include "layout.h"

namespace {

// How far ahead of what is multiplied weights are asked for, and from how many rows on: fewer wait for memory alone, and
// the processor runs ahead by itself; more keep it multiplying, and it would ask too late. Short weights are all but
// float32, for which 8 lanes alone ask.
constexpr int PREFETCH_BYTES = 2048;
constexpr int ROWS_TO_ASK_FOR_SHORT = LANES == 8 ? 1 : 3;
constexpr int ROWS_TO_ASK_FOR_FLOAT = LANES == 8 ? 3 : INT32_MAX;

enum class Into { store, add };

// y = or += result of one row and one vector of outputs.
inline void put(const Product& product, int64_t output, Vector result, float* y, Into into) {
    if (product.bias) result += load(product.bias + output);
    store(y + output, into == Into::add ? load(y + output) + result : result);
}

// How many of so many rows share a panel's weights next, MOST at most: about as many each time, since one row alone after
// others waits for each of its sums.
inline int64_t rows_sharing(int64_t rows, int64_t most) {
    const int64_t times = (rows + most - 1) / most;
    return (rows + times - 1) / times;
}

// Fetches BYTES of what will be read after `from`.
template <int BYTES>
inline void ask_ahead(const void* from) {
    for (int at = 0; at < BYTES; at += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + PREFETCH_BYTES + at);
}

}  // namespace
