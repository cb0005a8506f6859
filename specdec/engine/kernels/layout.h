// What a caller lays out: weights in panels, a batch of ragged sequences over a paged cache.
//
// `specdec.engine.native.structures` has the same structures, field by field. Nothing is computed here.

#pragma once

#include "vector.h"

namespace {

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = LANES * PANEL_VECTORS;  // outputs side by side in a panel
constexpr int GROUP = 4;                      // inputs of int8 weights that are multiplied and summed at once
constexpr int SHARED = 32;                    // inputs of scaled weights that share a scale
constexpr int ZERO = 128;                     // of a row as integers: the byte that is 0
constexpr int KEYS = 16;                      // tokens of a KV block
constexpr int MAX_QUERIES = 4;                // queries that share a key while it is in registers
constexpr int CACHE_LINE = 64;                // bytes

// How a table of weights is stored; the caller says it by these numbers.
// A number of SCALED4 or SCALED8 is scale * integer + offset, in float32 and rounded once; SHARED inputs of an output have
// them in common.
enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, SCALED4 = 4, SCALED8 = 5 };

int64_t padded(int64_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

int64_t grouped(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

}  // namespace

// A linear layer. `weights` is [ceil(outputs / PANEL)][inputs][PANEL], zeros beyond `outputs`; in bfloat16 the panel's
// two halves lie in turn, an output of the first, one of the second, which takes fewer instructions apart. Of int8 weights
// [ceil(outputs / PANEL)][ceil(inputs / GROUP)][PANEL][GROUP]; of scaled weights [ceil(outputs / PANEL)][inputs / SHARED],
// each with PANEL scales and PANEL offsets in binary16, then SHARED times PANEL integers: bytes with a sign, or halves of
// bytes without one, of which the low ones are a row's first and the high ones its second.
struct Product {
    const void* weights;
    int64_t format;          // of `weights`, a `Format`
    const float* scales;     // [padded outputs]: of int8 weights; null otherwise
    const int32_t* offsets;  // [padded outputs]: ZERO times the sum of an output's int8 weights; null otherwise
    const float* bias;       // [padded outputs] or null
    int64_t inputs;
    int64_t outputs;
};

struct Layer {
    Product qkv;  // queries of all heads, keys, values
    Product output;
    Product gate_up;
    Product down;
    const float* attention_gains;  // [hidden]
    const float* mlp_gains;        // [hidden]
    const float* qk_gains;         // [heads + kv_heads, head_dim] or null
    float* cache;                  // [slots, 2 * kv_heads * (head_dim + mark)]: keys of all heads, then values
    int64_t window;                // tokens that a token sees, itself included; 0: all before it
    int64_t mark;                  // numbers by which keys and values are longer where nobody sees position 0; else 0
    float unseen;                  // the last of those, of the keys at position 0; all others are 0
};

struct DraftHead;

struct Model {
    const Layer* layers;
    int64_t num_layers;
    int64_t hidden;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t mlp;
    const void* embeddings;    // [rows of the table, hidden]
    int64_t embedding_format;  // a `Format`, not INT8
    const float* cosines;      // [positions, head_dim]
    const float* sines;        // [positions, head_dim]
    const float* final_gains;  // [hidden]
    Product head;
    float epsilon;     // of the norms
    float qk_epsilon;  // of the norms of queries and keys
    float scaling;     // of attention scores
    const int64_t* tapped;  // [num_tapped], ascending: layers whose outputs are wanted
    int64_t num_tapped;
    const DraftHead* draft_heads;  // whose features and KV a step writes
    int64_t num_draft_heads;
};

// One decoder layer that reads a token's embedding beside the feature of the position before it.
struct DraftHead {
    Model model;                 // of its one layer, as wide as the target's; its qkv has twice the inputs
    Product features_of;         // from the outputs of tapped layers, side by side, to a feature
    const int64_t* taps;         // [num_taps]: which of the tapped layers
    int64_t num_taps;
    const float* feature_gains;  // [hidden]
    float* features;             // [slots, hidden]
    int64_t adds_normed;         // whether the layer adds to the feature as it is normed, or as it came
    int64_t keeps_normed;        // whether a drafted token's feature is the output as it is normed, or as it came
};

struct Batch {
    int64_t tokens;
    int64_t sequences;
    int64_t logit_rows;
    const int64_t* first_row;     // [sequences + 1]: a sequence's rows are side by side, by position
    const int64_t* start;         // [sequences]: position of its first row
    const int64_t* tables;        // block ids of all sequences, one after the other
    const int64_t* table_offset;  // [sequences]: where a sequence's begin
    const int64_t* rows_wanted;   // [logit_rows]
    const int64_t* token_ids;     // [tokens]
    float* hidden;                // [tokens, hidden]: scratch, as is all below but the logits
    float* normed;                // [tokens, hidden]
    float* qkv;                   // [tokens, padded (heads + 2 * kv_heads) * head_dim]
    float* attended;              // [tokens, heads * head_dim]
    float* gate_up;               // [tokens, padded 2 * mlp]
    float* joined;                // [tokens, widest input of a draft head]
    uint8_t* integers;            // [tokens, 2 * widest inputs in whole groups]: rows as integers of 16 bits
    float* row_scales;            // [tokens]: what these are multiplied with
    float* scores;                // [num_threads, MAX_QUERIES, longest context in whole blocks]
    int64_t scores_width;
    float* logits;   // [logit_rows, padded outputs of the head]
    float* outputs;  // [num_tapped, tokens, hidden]
};

// Steps of a token of each sequence that follow a batch, each token the likeliest of the step before.
struct MultiStep {
    int64_t steps;            // the batch among them
    int64_t num_tokens;       // of the head's outputs, those that can be chosen
    const int64_t* rows;      // [sequences + 1], ascending from 0
    const int64_t* starts;    // [steps - 1, sequences]: positions of the tokens of each further step
    int64_t* token_ids;       // [steps, sequences]: what was chosen
    float* logits;            // [steps, sequences]: of what was chosen
};
