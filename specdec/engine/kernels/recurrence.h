// Recurrent layers of hybrids, row after row of one sequence: the gated delta rule and the scan of Mamba 2.
//
// A library of matrices computes such rows in chunks, which round differently for every length, or by a dozen operations
// a row. Here each head's state stays in the cache while the rows pass. Heads are independent, so they are divided among
// threads; every sum has one order, so a row has the same bits however the rows are grouped into calls.
//
// Included by `step.cpp`; called through it from `specdec.engine.model.recurrent_rows`.

#pragma once

#include "vector.h"

namespace {

constexpr int64_t MAX_WIDTH = 1024;  // of a state of the delta rule

// Rows of one sequence and its states, [heads, height, width] each. Mirrored by `recurrent_rows._Rows`.
struct RecurrentRows {
    int64_t count, heads, height, width;
    int64_t groups;        // heads / groups adjacent heads share a row of `write` and of `read`
    const float* source;   // state before the rows; null: zeros
    float* work;           // a state's room for work
    const int64_t* saves;  // ascending numbers of rows after which the state is saved
    float* const* saved;   // where each of them goes; it may be the source
    int64_t num_saves;
    const float* decay;   // [count, heads]
    const float* gate;    // [count, heads]: the share that a row changes, or its step
    const float* values;  // [count, heads, width] of the delta rule, [count, heads, height] of the scan
    const float* write;   // [count, groups, height] of the delta rule, [count, groups, width] of the scan
    const float* read;    // as `write`
    float* output;        // as `values`
};

// state = decay * state; state += write x gate * (value - write * state); output = read * state.
inline void delta_row(const RecurrentRows& rows, int64_t row, int64_t head, float* state) {
    const int64_t at = row * rows.heads + head, group = head / (rows.heads / rows.groups), width = rows.width;
    const float* write = rows.write + (row * rows.groups + group) * rows.height;
    const float* read = rows.read + (row * rows.groups + group) * rows.height;
    const float decay = rows.decay[at], gate = rows.gate[at];
    float* change = rows.output + at * width;  // the output's room, which is written last
    const float* value = rows.values + at * width;
    for (int64_t lane = 0; lane < width; ++lane) change[lane] = 0;
    for (int64_t line = 0; line < rows.height; ++line) {
        float* here = state + line * width;
        const float key = write[line];
        for (int64_t lane = 0; lane < width; ++lane) {
            here[lane] *= decay;
            change[lane] += here[lane] * key;
        }
    }
    float kept[MAX_WIDTH];
    for (int64_t lane = 0; lane < width; ++lane) {
        kept[lane] = (value[lane] - change[lane]) * gate;
        change[lane] = 0;
    }
    for (int64_t line = 0; line < rows.height; ++line) {
        float* here = state + line * width;
        const float key = write[line], query = read[line];
        for (int64_t lane = 0; lane < width; ++lane) {
            here[lane] += key * kept[lane];
            change[lane] += here[lane] * query;
        }
    }
}

// state = decay * state + gate * value x write; output = state * read.
inline void scan_row(const RecurrentRows& rows, int64_t row, int64_t head, float* state) {
    const int64_t at = row * rows.heads + head, group = head / (rows.heads / rows.groups), width = rows.width;
    const float* write = rows.write + (row * rows.groups + group) * width;
    const float* read = rows.read + (row * rows.groups + group) * width;
    const float decay = rows.decay[at], step = rows.gate[at];
    for (int64_t line = 0; line < rows.height; ++line) {
        float* here = state + line * width;
        const float input = rows.values[at * rows.height + line] * step;
        float sums[LANES] = {};
        int64_t first = 0;
        for (; first + LANES <= width; first += LANES)
            for (int lane = 0; lane < LANES; ++lane) {
                const int64_t place = first + lane;
                here[place] = here[place] * decay + input * write[place];
                sums[lane] += here[place] * read[place];
            }
        float sum = 0;
        for (; first < width; ++first) {
            here[first] = here[first] * decay + input * write[first];
            sum += here[first] * read[first];
        }
        for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
        rows.output[at * rows.height + line] = sum;
    }
}

template <typename Row>
void run_rows(const RecurrentRows& rows, int num_threads, Row run) {
    const int64_t size = rows.height * rows.width;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t head = 0; head < rows.heads; ++head) {
        float* state = rows.work + head * size;
        if (rows.source)
            std::memcpy(state, rows.source + head * size, size * sizeof(float));
        else
            std::memset(state, 0, size * sizeof(float));
        for (int64_t row = 0, next = 0; row < rows.count; ++row) {
            run(rows, row, head, state);
            for (; next < rows.num_saves && rows.saves[next] == row + 1; ++next)
                std::memcpy(rows.saved[next] + head * size, state, size * sizeof(float));
        }
    }
}

}  // namespace
