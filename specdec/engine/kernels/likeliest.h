// The likeliest token of a row of logits.
//
// As NumPy's argmax says it: of equal ones the first, and what is no number counts as larger than anything. Not here:
// what is drawn from a law (`noise.h`). Included by `step.cpp`.

#pragma once

#include "vector.h"

namespace {

int64_t likeliest(const float* logits, int64_t num_tokens) {
    const int64_t whole = num_tokens / LANES * LANES;
    Vector best = broadcast(-__builtin_inff());
    Integers odd{};  // lanes in which something was no number
    for (int64_t at = 0; at < whole; at += LANES) {
        const Vector here = load(logits + at);
        odd |= here != here;
        best = here > best ? here : best;
    }
    float most = largest(best);
    bool is_odd = false;
    for (int lane = 0; lane < LANES; ++lane) is_odd |= odd[lane] != 0;
    for (int64_t at = whole; at < num_tokens; ++at) {
        is_odd |= logits[at] != logits[at];
        most = logits[at] > most ? logits[at] : most;
    }
    for (int64_t at = 0; at < num_tokens; ++at)
        if (is_odd ? logits[at] != logits[at] : logits[at] == most) return at;
    return 0;
}

}  // namespace
