// One step of a Llama-shaped decoder on a CPU: all layers over a ragged, paged batch in one call.
//
// The time of a step with few rows is bound by reading the weights once. A tensor library adds more than that: a dozen
// operations per layer, weights laid out for many rows, copies of keys and values. Here the panels of weights are in
// the order in which they are read, and attention reads the cache's blocks in place.
//
// A row's result has the same bits whatever else is in the batch. Each output is summed over its inputs in order, and
// each query over its own keys; neither order depends on the number of rows, on their place or on the thread. The code
// also states where a product and a sum are rounded once (`multiply_add`). NaNs are the exception: they may reach every
// row of their sequence in the step.
//
// `specdec.engine.native.native_runner` lays out the structures and calls the C interface at the end of this file. Nothing is
// allocated here. One thread calls a step; with OpenMP its loops are divided among `num_threads`.

#include "draft_head.h"
#include "argmax.h"
#include "noise.h"
#include "recurrence.h"

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {

// Copies a layer's outputs for the caller.
void hand_out(const Model& model, const Batch& batch, int64_t tap) {
    const int64_t width = model.hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch.tokens; ++row)
        std::memcpy(batch.outputs + (tap * batch.tokens + row) * width, batch.hidden + row * width,
                    width * sizeof(float));
}

}  // namespace

extern "C" {

// Returns the number of outputs per panel, by which the caller packs weights.
int64_t specdec_panel() { return PANEL; }

int64_t specdec_max_queries() { return MAX_QUERIES; }

// Returns the number of inputs per group, by which the caller packs int8 weights.
int64_t specdec_group() { return GROUP; }

// Returns whether the loops above support a model's widths.
int specdec_fits(int64_t hidden, int64_t head_dim) {
    return hidden % PANEL == 0 && head_dim % LANES == 0 && attend_of(head_dim) != nullptr;
}

// Returns the format that holds a kind of GGUF's blocks as they are, and FLOAT32 if none does.
int64_t specdec_format_of(int64_t kind) { return held_in(kind).format; }

// Returns the bytes of a panel of blocks.
int64_t specdec_panel_bytes(int64_t kind, int64_t inputs) {
    const Held held = held_in(kind);
    const int64_t upper = num_upper_bits(held.format), bits = held.format == SCALED8 ? 8 : 4 + upper;
    const int64_t scales = held.format == SUPER6  ? inputs / SUPER * 2 + inputs / FINE
                           : held.inputs == SUPER ? inputs / SUPER * 4 + inputs / SHARED * 2
                                                  : inputs / SHARED * 4;
    return PANEL * (scales + inputs * bits / 8);
}

// Packs rows of blocks of one kind into whole panels; `rows` has the address of each, null for a row of zeros. Returns the
// number of panels that the format does not hold.
int64_t specdec_pack_blocks(int64_t kind, const uint8_t* const* rows, int64_t num_panels, int64_t inputs, uint8_t* to,
                            int num_threads) {
    const int64_t panel_bytes = specdec_panel_bytes(kind, inputs);
    int64_t num_failed = 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1) reduction(+ : num_failed)
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        uint8_t* at = to + panel * panel_bytes;
        for (int64_t input = 0; input < inputs; input += SUPER) {
            const int64_t count = inputs - input < SUPER ? inputs - input : SUPER;
            Parts parts[PANEL] = {};
            for (int lane = 0; lane < PANEL; ++lane)
                if (const uint8_t* row = rows[panel * PANEL + lane]) {
                    take_apart(kind, row, input, inputs, parts[lane]);
                    num_failed += overflows(kind, parts[lane], count);
                }
            at = put_panel(held_in(kind).format, parts, count, at);
        }
    }
    return num_failed;
}

// Writes rows of a GGUF file as float32; `rows` has the address of each.
void specdec_widen_rows(int64_t kind, const uint8_t* const* rows, int64_t num_rows, int64_t inputs, float* to,
                        int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) put_row(kind, rows[row], inputs, to + row * inputs);
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

// Runs rows of one sequence through the gated delta rule. Returns whether the loops above support the state's width.
int specdec_delta_rows(const RecurrentRows* rows, int num_threads) {
    if (rows->width > MAX_WIDTH) return 0;
    run_rows(*rows, num_threads, delta_row);
    return 1;
}

// Runs rows of one sequence through the scan of Mamba 2. Returns whether it has: always.
int specdec_scan_rows(const RecurrentRows* rows, int num_threads) {
    run_rows(*rows, num_threads, scan_row);
    return 1;
}

// Writes the argmax token of each row of logits, and its logit. Rows begin `stride` apart.
void specdec_argmax(const float* logits, int64_t num_rows, int64_t stride, int64_t num_tokens, int64_t* token_ids,
                    float* maxima) {
    for (int64_t row = 0; row < num_rows; ++row) {
        token_ids[row] = argmax(logits + row * stride, num_tokens);
        maxima[row] = logits[row * stride + token_ids[row]];
    }
}

// Runs a step with one logit row per sequence and the steps that follow it. The batch's tables cover all of them.
void specdec_multi_step(const Model* model, const Batch* batch, const MultiStep* multi_step, int num_threads) {
    Batch step = *batch;
    for (int64_t index = 0; index < multi_step->steps; ++index) {
        int64_t* chosen = multi_step->token_ids + index * step.sequences;
        if (index > 0) {
            step.tokens = step.sequences;
            step.first_row = step.rows_wanted = multi_step->rows;
            step.start = multi_step->starts + (index - 1) * step.sequences;
            step.token_ids = chosen - step.sequences;
        }
        specdec_step(model, &step, num_threads);
        specdec_argmax(step.logits, step.sequences, padded(model->head.outputs), multi_step->num_tokens, chosen,
                       multi_step->logits + index * step.sequences);
    }
}

// Runs a draft step of one head, with one token and one row of logits per sequence.
void specdec_draft(const DraftHead* head, const Batch* batch, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    draft(*head, *batch, batch->scores + omp_get_thread_num() * MAX_QUERIES * batch->scores_width);
}

// Writes the coupled choice of each row of probabilities; rows are contiguous and have one key each.
void specdec_coupled_choices(const double* masses, int64_t num_rows, int64_t num_tokens, const NoiseKey* keys,
                             int64_t* choices, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
    for (int64_t row = 0; row < num_rows; ++row)
        choices[row] = coupled_choice(masses + row * num_tokens, num_tokens, keys[row]);
}
}
