// Argmax of a row of logits, with the rules of NumPy's argmax: the first of equal logits wins, and the first NaN wins
// over all numbers. Included by `step.cpp`; called through it from `specdec.engine.logits.kernel_choices`.

#pragma once

#include "vector.h"

namespace {

constexpr int ABREAST = 4;                        // independent vectors, whose comparisons overlap
constexpr int64_t STRETCH = 4 * ABREAST * LANES;  // numbers between two checks of all lanes

inline bool has_any(Integers lanes) {
    int32_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= lanes[lane];
    return any != 0;
}

int64_t argmax(const float* logits, int64_t num_tokens) {
    const int64_t whole = num_tokens / STRETCH * STRETCH;
    Vector best[ABREAST];
    Integers odd[ABREAST] = {};  // lanes that met a NaN
    for (Vector& one : best) one = broadcast(-__builtin_inff());
    for (int64_t at = 0; at < whole; at += ABREAST * LANES)
#pragma GCC unroll 4
        for (int next = 0; next < ABREAST; ++next) {
            const Vector here = load(logits + at + next * LANES);
            odd[next] |= here != here;
            best[next] = here > best[next] ? here : best[next];
        }
    float most = -__builtin_inff();
    bool is_odd = false;
    for (int next = 0; next < ABREAST; ++next) {
        is_odd |= has_any(odd[next]);
        most = largest(best[next]) > most ? largest(best[next]) : most;
    }
    for (int64_t at = whole; at < num_tokens; ++at) {
        is_odd |= logits[at] != logits[at];
        most = logits[at] > most ? logits[at] : most;
    }
    int64_t at = 0;
    for (; !is_odd && at < whole; at += STRETCH) {
        Integers found{};
        for (int64_t next = at; next < at + STRETCH; next += LANES) found |= load(logits + next) == most;
        if (has_any(found)) break;
    }
    for (; at < num_tokens; ++at)
        if (is_odd ? logits[at] != logits[at] : logits[at] == most) return at;
    return 0;
}

}  // namespace
