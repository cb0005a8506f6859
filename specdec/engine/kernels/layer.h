// The decoder layer: norms, embeddings, rotary embedding, KV store and gate.
//
// Products are in `products.h`, attention in `attention.h`. Included by `draft_head.h` and, through it, by `step.cpp`.

#pragma once

#include "attention.h"
#include "blocks.h"
#include "products.h"

namespace {

// to = x / rms(x) * gains over `width` numbers.
void normalise(const float* x, const float* gains, int64_t width, float epsilon, float* to) {
    Vector squares{};
    for (int64_t at = 0; at < width; at += LANES) squares = multiply_add(load(x + at), load(x + at), squares);
    const float mean = sum(squares) / static_cast<float>(width);
    const Vector scale = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t at = 0; at < width; at += LANES) store(to + at, load(x + at) * scale * load(gains + at));
}

template <class Weight>
void embed_from(const void* table, int64_t token_id, int64_t width, float* to) {
    const Weight* from = static_cast<const Weight*>(table) + token_id * width;
    for (int64_t at = 0; at < width; at += LANES) store(to + at, load(from + at));
}

void embed(const Model& model, int64_t token_id, float* to) {
    if (const int64_t row_bytes = model.embedding_row_bytes) {
        const uint8_t* row = static_cast<const uint8_t*>(model.embeddings) + token_id * row_bytes;
        return put_row(model.embedding_format, row, model.hidden, to);
    }
    switch (model.embedding_format) {
        case BFLOAT16: return embed_from<Bfloat16>(model.embeddings, token_id, model.hidden, to);
        case FLOAT16: return embed_from<Float16>(model.embeddings, token_id, model.hidden, to);
        default: return embed_from<float>(model.embeddings, token_id, model.hidden, to);
    }
}

void normalise_rows(const float* x, const float* gains, const Batch& batch, int64_t width, float epsilon, float* to) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch.tokens; ++row)
        normalise(x + row * width, gains, width, epsilon, to + row * width);
}

// Rotary embedding of one head in place: x cos + (-x2, x1) sin.
void rotate(float* head, const float* cosines, const float* sines, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t at = 0; at < half; ++at) {
        const float first = head[at], second = head[at + half];
        head[at] = first * cosines[at] - second * sines[at];
        head[at + half] = second * cosines[at + half] + first * sines[at + half];
    }
}

int64_t slot_of(const Batch& batch, int64_t sequence, int64_t position) {
    return batch.tables[batch.table_offset[sequence] + position / KEYS] * KEYS + position % KEYS;
}

// Stores keys and values of one token, each extended by the layer's `mark` numbers.
void keep_marked(const Model& model, const Layer& layer, const float* from, int64_t position, float* to) {
    const int64_t dim = model.head_dim;
    for (int64_t head = 0; head < 2 * model.kv_heads; ++head, from += dim, to += dim + layer.mark) {
        std::memcpy(to, from, dim * sizeof(float));
        std::memset(to + dim, 0, layer.mark * sizeof(float));
        if (head < model.kv_heads && position == 0) to[dim + layer.mark - 1] = layer.unseen;
    }
}

// Applies norms and the rotary embedding to queries and keys, then stores keys and values in the cache.
void place(const Model& model, const Layer& layer, const Batch& batch) {
    const int64_t dim = model.head_dim, rotated = model.heads + model.kv_heads;
    const int64_t stride = padded(layer.qkv.outputs), cached = 2 * model.kv_heads * (dim + layer.mark);
#pragma omp for schedule(static)
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
        for (int64_t row = batch.first_row[sequence]; row < batch.first_row[sequence + 1]; ++row) {
            const int64_t position = batch.start[sequence] + row - batch.first_row[sequence];
            float* heads = batch.qkv + row * stride;
            for (int64_t head = 0; head < rotated; ++head) {
                float* one = heads + head * dim;
                if (layer.qk_gains) normalise(one, layer.qk_gains + head * dim, dim, model.qk_epsilon, one);
                rotate(one, model.cosines + position * dim, model.sines + position * dim, dim);
            }
            float* to = layer.cache + slot_of(batch, sequence, position) * cached;
            if (layer.mark)
                keep_marked(model, layer, heads + model.heads * dim, position, to);
            else
                std::memcpy(to, heads + model.heads * dim, cached * sizeof(float));
        }
}

// gate_up [tokens, 2 * mlp] -> silu(gate) * up, into the first half of each row. The last vector may reach beyond that
// half: it overwrites numbers that have been read, reads padding, and its results there are not used.
void gate(const Batch& batch, int64_t mlp, int64_t stride) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch.tokens; ++row) {
        float* gates = batch.gate_up + row * stride;
        for (int64_t at = 0; at < mlp; at += LANES) {
            const Vector x = load(gates + at);
            store(gates + at, x / (broadcast(1.0f) + exponential(-x)) * load(gates + mlp + at));
        }
    }
}

// Computes queries, keys and values of rows [tokens, inputs of qkv].
void project(const Model& model, const Layer& layer, const Batch& batch, const float* rows) {
    apply(layer.qkv, batch, rows, layer.qkv.inputs, batch.tokens, batch.qkv, padded(layer.qkv.outputs), Into::store);
    place(model, layer, batch);
}

// Adds the layer's change to `hidden`, once queries, keys and values are there.
void add_layer(const Model& model, const Layer& layer, const Batch& batch, float* scores) {
    const int64_t hidden = model.hidden, tokens = batch.tokens, wide = padded(layer.gate_up.outputs);
    attend_all(model, layer, batch, scores);
    apply(layer.output, batch, batch.attended, model.heads * model.head_dim, tokens, batch.hidden, hidden, Into::add);
    normalise_rows(batch.hidden, layer.mlp_gains, batch, hidden, model.epsilon, batch.normed);
    apply(layer.gate_up, batch, batch.normed, hidden, tokens, batch.gate_up, wide, Into::store);
    gate(batch, model.mlp, wide);
    apply(layer.down, batch, batch.gate_up, wide, tokens, batch.hidden, hidden, Into::add);
}

void run_layer(const Model& model, const Layer& layer, const Batch& batch, float* scores) {
    normalise_rows(batch.hidden, layer.attention_gains, batch, model.hidden, model.epsilon, batch.normed);
    project(model, layer, batch, batch.normed);
    add_layer(model, layer, batch, scores);
}

}  // namespace
