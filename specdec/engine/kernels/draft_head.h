// A draft head with one decoder layer: the features and KV that a full step writes for it, and its draft step.
//
// `specdec.engine.heads.interface` explains the method; `layer.h` computes the layer. Included by `step.cpp`.

#pragma once

#include "layer.h"

namespace {

// Copies rows of the batch into the feature slots of their tokens.
void keep_features(const DraftHead& head, const Batch& batch, const float* rows) {
    const int64_t width = head.model.hidden;
#pragma omp for schedule(static)
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
        for (int64_t row = batch.first_row[sequence]; row < batch.first_row[sequence + 1]; ++row) {
            const int64_t position = batch.start[sequence] + row - batch.first_row[sequence];
            std::memcpy(head.features + slot_of(batch, sequence, position) * width, rows + row * width,
                        width * sizeof(float));
        }
}

// Writes each token's normed embedding and the normed feature of the position before it, side by side, into `joined`,
// and the residual into `hidden`.
void join(const DraftHead& head, const Batch& batch) {
    const Model& model = head.model;
    const int64_t width = model.hidden;
#pragma omp for schedule(static)
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
        for (int64_t row = batch.first_row[sequence]; row < batch.first_row[sequence + 1]; ++row) {
            const int64_t position = batch.start[sequence] + row - batch.first_row[sequence];
            float *embedded = batch.joined + row * 2 * width, *feature = embedded + width;
            float* added_to = batch.hidden + row * width;
            embed(model, batch.token_ids[row], embedded);
            normalise(embedded, model.layers->attention_gains, width, model.epsilon, embedded);
            if (position == 0)
                std::memset(added_to, 0, width * sizeof(float));
            else
                std::memcpy(added_to, head.features + slot_of(batch, sequence, position - 1) * width,
                            width * sizeof(float));
            normalise(added_to, head.feature_gains, width, model.epsilon, feature);
            if (head.adds_normed) std::memcpy(added_to, feature, width * sizeof(float));
        }
}

// Computes the features and KV of a full step's tokens. Overwrites `hidden`.
void note_step(const DraftHead& head, const Batch& batch) {
    const int64_t width = head.model.hidden, wide = head.features_of.inputs;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < batch.tokens; ++row)
        for (int64_t tap = 0; tap < head.num_taps; ++tap)
            std::memcpy(batch.joined + row * wide + tap * width,
                        batch.outputs + (head.taps[tap] * batch.tokens + row) * width, width * sizeof(float));
    apply(head.features_of, batch, batch.joined, wide, batch.tokens, batch.hidden, width, Into::store);
    keep_features(head, batch, batch.hidden);
    join(head, batch);
    project(head.model, *head.model.layers, batch, batch.joined);
}

void draft(const DraftHead& head, const Batch& batch, float* scores) {
    const Model& model = head.model;
    join(head, batch);
    project(model, *model.layers, batch, batch.joined);
    add_layer(model, *model.layers, batch, scores);
    normalise_rows(batch.hidden, model.final_gains, batch, model.hidden, model.epsilon, batch.normed);
    keep_features(head, batch, head.keeps_normed ? batch.normed : batch.hidden);
    apply(model.head, batch, batch.normed, model.hidden, batch.tokens, batch.logits, padded(model.head.outputs),
          Into::store);
}

}  // namespace
