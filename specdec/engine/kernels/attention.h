// Attention of a ragged batch that reads the cache's blocks in place.
//
// Each query is summed over its own keys, starting at a whole block, whatever other queries share those keys. Norms,
// the rotary embedding and the KV store are in `layer.h`, which includes this file.

#pragma once

#include <algorithm>

#include "layout.h"

namespace {

// Maximum number of bytes of a sequence's keys and values that are read ahead: about the size of a core's cache.
constexpr int64_t MOST_READ_THROUGH = 2 << 20;

// Queries that read the same keys: rows of one sequence and heads of one group.
struct Queries {
    int count;
    const float* query[MAX_QUERIES];
    float* output[MAX_QUERIES];
    int64_t position[MAX_QUERIES];
};

// The keys and values of one sequence and KV head in the cache.
struct Cached {
    const float* rows;
    const int64_t* table;
    int64_t stride;  // between tokens
    int64_t values;  // from a token's key to its value
    int64_t lowest;  // lowest visible position; a query before it sees only itself

    const float* block(int64_t key) const { return rows + table[key / KEYS] * KEYS * stride; }
};

// Reads the keys and values of all heads that the queries of a sequence see, in the order of their addresses. One
// head's keys are scattered among those of the other heads, so the hardware prefetcher would find no pattern and
// attention would wait for nearly every key. Software prefetches of scattered keys do not help either.
void read_through(const Batch& batch, int64_t sequence, const float* rows, int64_t stride, int64_t window) {
    constexpr int64_t line = CACHE_LINE / sizeof(float);
    const int64_t start = batch.start[sequence], tokens = batch.first_row[sequence + 1] - batch.first_row[sequence];
    const int64_t begin = window && start >= window ? start - window + 1 : 0;
    const int64_t end = std::min(start + tokens, begin + MOST_READ_THROUGH / (stride * int64_t{sizeof(float)}));
    const int64_t* table = batch.tables + batch.table_offset[sequence];
    for (int64_t key = begin / KEYS * KEYS; key < end; key += KEYS) {
        const volatile float* block = rows + table[key / KEYS] * KEYS * stride;
        const int64_t numbers = std::min<int64_t>(end - key, KEYS) * stride;
        for (int64_t at = 0; at < numbers; at += line) (void)block[at];
    }
}

// scores[q][key - begin] = query . key for whole blocks of keys; scores past the last token are undefined.
template <int DIM_VECTORS, int COUNT>
void score(const Cached& cached, const Queries& queries, int64_t begin, int64_t end, float* scores, int64_t width) {
    for (int64_t first = begin; first < end; first += LANES) {
        const float* keys = cached.block(first) + first % KEYS * cached.stride;
        for (int q = 0; q < COUNT; ++q) {
            Vector products[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; ++key) {
                products[key] = load(keys + key * cached.stride) * load(queries.query[q]);
                for (int part = 1; part < DIM_VECTORS; ++part)
                    products[key] = multiply_add(load(keys + key * cached.stride + part * LANES),
                                                 load(queries.query[q] + part * LANES), products[key]);
            }
            store(scores + q * width + first - begin, sums(products));
        }
    }
}

// Softmax over the keys that a query sees; all other weights become 0.
void weigh(float* row, int64_t visible_from, int64_t visible_to, int64_t count, float scaling) {
    // Other queries of the tile may see these keys.
    for (int64_t key = 0; key < visible_from; ++key) row[key] = -__builtin_inff();
    for (int64_t key = visible_to; key < count; ++key) row[key] = -__builtin_inff();
    Vector maxima = broadcast(row[visible_from]);
    for (int64_t at = 0; at < count; at += LANES) {
        const Vector score = load(row + at);
        maxima = score > maxima ? score : maxima;
    }
    const float highest = largest(maxima);
    Vector total{};
    for (int64_t at = 0; at < count; at += LANES) {
        const Vector score = load(row + at);
        Vector weight = exponential((score - broadcast(highest)) * broadcast(scaling));
        weight = score == -__builtin_inff() ? Vector{} : weight;
        store(row + at, weight);
        total += weight;
    }
    const Vector factor = broadcast(1.0f / sum(total));
    for (int64_t at = 0; at < count; at += LANES) store(row + at, load(row + at) * factor);
}

template <int DIM_VECTORS, int COUNT>
void attend(const Cached& cached, const Queries& queries, int64_t window, float scaling, float* scores, int64_t width) {
    int64_t first = INT64_MAX, last = 0;
    int64_t lowest[COUNT];
    for (int q = 0; q < COUNT; ++q) {
        const int64_t position = queries.position[q];
        lowest[q] = window && position >= window ? position - window + 1 : 0;
        if (lowest[q] < cached.lowest) lowest[q] = position < cached.lowest ? position : cached.lowest;
        first = lowest[q] < first ? lowest[q] : first;
        last = position > last ? position : last;
    }
    const int64_t begin = first / KEYS * KEYS, end = last + 1, count = (end - begin + KEYS - 1) / KEYS * KEYS;
    score<DIM_VECTORS, COUNT>(cached, queries, begin, end, scores, width);
    for (int q = 0; q < COUNT; ++q)
        weigh(scores + q * width, lowest[q] - begin, queries.position[q] + 1 - begin, count, scaling);
    Vector outputs[COUNT][DIM_VECTORS] = {};
    for (int64_t key = begin; key < end; ++key) {
        const float* value = cached.block(key) + key % KEYS * cached.stride + cached.values;
        for (int q = 0; q < COUNT; ++q) {
            const Vector weight = broadcast(scores[q * width + key - begin]);
            for (int part = 0; part < DIM_VECTORS; ++part)
                outputs[q][part] = multiply_add(weight, load(value + part * LANES), outputs[q][part]);
        }
    }
    for (int q = 0; q < COUNT; ++q)
        for (int part = 0; part < DIM_VECTORS; ++part) store(queries.output[q] + part * LANES, outputs[q][part]);
}

template <int DIM_VECTORS>
void attend_tile(const Cached& cached, const Queries& queries, int64_t window, float scaling, float* scores,
                 int64_t width) {
    switch (queries.count) {
        case 1: return attend<DIM_VECTORS, 1>(cached, queries, window, scaling, scores, width);
        case 2: return attend<DIM_VECTORS, 2>(cached, queries, window, scaling, scores, width);
        case 3: return attend<DIM_VECTORS, 3>(cached, queries, window, scaling, scores, width);
        default: return attend<DIM_VECTORS, 4>(cached, queries, window, scaling, scores, width);
    }
}

using Attend = void (*)(const Cached&, const Queries&, int64_t, float, float*, int64_t);

Attend attend_of(int64_t head_dim) {
    switch (head_dim / LANES) {
        case 1: return attend_tile<1>;
        case 2: return attend_tile<2>;
        case 3: return attend_tile<3>;
        case 4: return attend_tile<4>;
        case 5: return attend_tile<5>;
        case 6: return attend_tile<6>;
        case 8: return attend_tile<8>;
        case 10: return attend_tile<10>;
        case 12: return attend_tile<12>;
        case 16: return attend_tile<16>;
        case 32: return attend_tile<32>;
        default: return nullptr;
    }
}

void attend_all(const Model& model, const Layer& layer, const Batch& batch, float* scores) {
    const int64_t dim = model.head_dim, group = model.heads / model.kv_heads, stride = padded(layer.qkv.outputs);
    const int64_t pitch = dim + layer.mark;
    const Attend attend_queries = attend_of(dim);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
        for (int64_t kv_head = 0; kv_head < model.kv_heads; ++kv_head) {
            if (kv_head == 0) read_through(batch, sequence, layer.cache, 2 * model.kv_heads * pitch, layer.window);
            const Cached cached{layer.cache + kv_head * pitch, batch.tables + batch.table_offset[sequence],
                                2 * model.kv_heads * pitch, model.kv_heads * pitch, layer.mark ? 1 : 0};
            Queries queries{};
            for (int64_t row = batch.first_row[sequence]; row < batch.first_row[sequence + 1]; ++row)
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                    queries.query[queries.count] = batch.qkv + row * stride + head * dim;
                    queries.output[queries.count] = batch.attended + (row * model.heads + head) * dim;
                    queries.position[queries.count] = batch.start[sequence] + row - batch.first_row[sequence];
                    const bool is_last = row + 1 == batch.first_row[sequence + 1] && head + 1 == (kv_head + 1) * group;
                    if (++queries.count == MAX_QUERIES || is_last) {
                        attend_queries(cached, queries, layer.window, model.scaling, scores, batch.scores_width);
                        queries.count = 0;
                    }
                }
        }
}

}  // namespace
