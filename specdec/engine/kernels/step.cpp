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

#include "draft_head.h"
#include "argmax.h"
#include "noise.h"

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {

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
        for (int64_t head = 0; head < model->num_draft_heads; ++head) note_step(model->draft_heads[head], *batch);
    }
}

// Rows of logits that begin `stride` apart: the likeliest token of each, and its logit.
void specdec_argmax(const float* logits, int64_t num_rows, int64_t stride, int64_t num_tokens, int64_t* token_ids,
                       float* maxima) {
    for (int64_t row = 0; row < num_rows; ++row) {
        token_ids[row] = argmax(logits + row * stride, num_tokens);
        maxima[row] = logits[row * stride + token_ids[row]];
    }
}

// A step of one logit row a sequence, and those that follow it; the batch's tables have blocks for all of them.
void specdec_multi_step(const Model* model, const Batch* batch, const MultiStep* run, int num_threads) {
    Batch step = *batch;
    for (int64_t index = 0; index < run->steps; ++index) {
        int64_t* chosen = run->token_ids + index * step.sequences;
        if (index > 0) {
            step.tokens = step.sequences;
            step.first_row = step.rows_wanted = run->rows;
            step.start = run->starts + (index - 1) * step.sequences;
            step.token_ids = chosen - step.sequences;
        }
        specdec_step(model, &step, num_threads);
        specdec_argmax(step.logits, step.sequences, padded(model->head.outputs), run->num_tokens, chosen,
                          run->logits + index * step.sequences);
    }
}

// A draft step of one head: a token and a row of logits a sequence.
void specdec_draft(const DraftHead* head, const Batch* batch, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    draft(*head, *batch, batch->scores + omp_get_thread_num() * MAX_QUERIES * batch->scores_width);
}

// Rows of probabilities, one after the other, each with a key: the token that wins each.
void specdec_coupled_choices(const double* masses, int64_t num_rows, int64_t num_tokens, const NoiseKey* keys,
                             int64_t* choices, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
    for (int64_t row = 0; row < num_rows; ++row)
        choices[row] = coupled_choice(masses + row * num_tokens, num_tokens, keys[row]);
}
}
