// Shared parts of all products of rows and panels: writing results and prefetching weights. Included by
// `int8_products.h`.

#pragma once

#include "layout.h"

namespace {

// Prefetch distance, and the number of rows from which weights are prefetched. With fewer rows the product waits for
// memory only, and the processor reads ahead by itself; with more rows it is busy multiplying and would read too late.
// Short weights are all formats except float32, which is prefetched only with 8 lanes.
constexpr int PREFETCH_BYTES = 2048;
constexpr int ROWS_TO_ASK_FOR_SHORT = LANES == 8 ? 1 : 3;
constexpr int ROWS_TO_ASK_FOR_FLOAT = LANES == 8 ? 3 : INT32_MAX;

enum class Into { store, add };

// Writes or adds the result of one row and one vector of outputs to y.
inline void put(const Product& product, int64_t output, Vector result, float* y, Into into) {
    if (product.bias) result += load(product.bias + output);
    store(y + output, into == Into::add ? load(y + output) + result : result);
}

// Returns how many of the remaining rows share a panel's weights next, at most `most`. The rows are divided evenly,
// because a single last row would wait for each of its sums.
inline int64_t rows_sharing(int64_t rows, int64_t most) {
    const int64_t times = (rows + most - 1) / most;
    return (rows + times - 1) / times;
}

// Prefetches BYTES at PREFETCH_BYTES after `from`.
template <int BYTES>
inline void ask_ahead(const void* from) {
    for (int at = 0; at < BYTES; at += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + PREFETCH_BYTES + at);
}

}  // namespace
