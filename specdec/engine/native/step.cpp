// One step of a Llama-shaped decoder on a CPU: every layer over a ragged, paged batch, in one call.
//
// A step of few rows is bound by reading the weights once; what a tensor library adds around that (an operation a
// dozen times a layer, weights in a layout for many rows, copies of keys and values) costs more than the reading.
// Here weights lie in panels in the order in which they are read, and attention reads the cache's blocks in place.
//
// A row's result has the same bits whatever else is in the batch: each output is summed over its inputs one after the
// other, each query over its own keys, and neither order knows the number of rows, their place or the thread; where a
// product and a sum are rounded once is written down too (`multiply_add`). What is no number spreads further: it may
// reach every row of its sequence in the step.
//
// Not here: which token comes next, who owns which block. Called through the C interface at the end, from
// `specdec.engine.native.runner`, which lays the structures out; nothing is allocated here. A step belongs to one
// thread; with OpenMP its loops are shared among `num_threads`.

#include "attention.h"
#include "products.h"

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

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

// Turns queries and keys to their positions in place: x cos + (-x2, x1) sin.
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

// Norms and positions of queries and keys, then keys and values into the cache.
void place(const Model& model, const Layer& layer, const Batch& batch) {
    const int64_t dim = model.head_dim, rotated = model.heads + model.kv_heads;
    const int64_t stride = padded(layer.qkv.outputs), cached = 2 * model.kv_heads * dim;
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
            std::memcpy(layer.cache + slot_of(batch, sequence, position) * cached, heads + model.heads * dim,
                        cached * sizeof(float));
        }
}

// gate_up [tokens, 2 * mlp] -> silu(gate) * up, into the first half of each row. The last vector may reach beyond the
// half: what it overwrites has been read, what it reads is padding, and nobody reads what it writes there.
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

void run_layer(const Model& model, const Layer& layer, const Batch& batch, float* scores) {
    const int64_t hidden = model.hidden, tokens = batch.tokens, wide = padded(layer.gate_up.outputs);
    normalise_rows(batch.hidden, layer.attention_gains, batch, hidden, model.epsilon, batch.normed);
    apply(layer.qkv, batch, batch.normed, hidden, tokens, batch.qkv, padded(layer.qkv.outputs), Into::store);
    place(model, layer, batch);
    attend_all(model, layer, batch, scores);
    apply(layer.output, batch, batch.attended, model.heads * model.head_dim, tokens, batch.hidden, hidden, Into::add);
    normalise_rows(batch.hidden, layer.mlp_gains, batch, hidden, model.epsilon, batch.normed);
    apply(layer.gate_up, batch, batch.normed, hidden, tokens, batch.gate_up, wide, Into::store);
    gate(batch, model.mlp, wide);
    apply(layer.down, batch, batch.gate_up, wide, tokens, batch.hidden, hidden, Into::add);
}

// A layer's outputs, copied for the caller.
void hand_out(const Model& model, const Batch& batch, int64_t tap) {
    const int64_t width = model.hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch.tokens; ++row)
        std::memcpy(batch.outputs + (tap * batch.tokens + row) * width, batch.hidden + row * width,
                    width * sizeof(float));
}

}  // namespace

extern "C" {

// Outputs of a panel: the caller packs weights by it.
int64_t specdec_panel() { return PANEL; }

int64_t specdec_max_queries() { return MAX_QUERIES; }

// Inputs of a group: the caller packs int8 weights by it.
int64_t specdec_group() { return GROUP; }

// Whether a model's widths are ones that the loops above take.
int specdec_fits(int64_t hidden, int64_t head_dim) {
    return hidden % PANEL == 0 && head_dim % LANES == 0 && attend_of(head_dim) != nullptr;
}

void specdec_step(const Model* model, const Batch* batch, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        float* scores = batch->scores + omp_get_thread_num() * MAX_QUERIES * batch->scores_width;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < batch->tokens; ++row)
            embed(*model, batch->token_ids[row], batch->hidden + row * model->hidden);
        for (int64_t layer = 0, tap = 0; layer < model->num_layers; ++layer) {
            run_layer(*model, model->layers[layer], *batch, scores);
            if (tap < model->num_tapped && model->tapped[tap] == layer) hand_out(*model, *batch, tap++);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < batch->logit_rows; ++row)
            normalise(batch->hidden + batch->rows_wanted[row] * model->hidden, model->final_gains, model->hidden,
                      model->epsilon, batch->normed + row * model->hidden);
        apply(model->head, *batch, batch->normed, model->hidden, batch->logit_rows, batch->logits,
              padded(model->head.outputs), Into::store);
    }
}
}
