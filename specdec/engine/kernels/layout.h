// The data that a caller lays out: weights in panels, and a batch of ragged sequences over a paged cache.
//
// `specdec.engine.native.structures` has the same structures, field by field.

#pragma once

#include "vector.h"

namespace {

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = LANES * PANEL_VECTORS;  // outputs side by side in a panel
constexpr int GROUP = 4;                      // inputs of int8 weights that are multiplied and summed at once
constexpr int SHARED = 32;                    // inputs of scaled weights that share a scale
constexpr int FINE = 16;                      // inputs of fine weights that share a scale
constexpr int SUPER = 256;                    // inputs whose scales share a factor
constexpr int CENTRE = 32;                    // integer of 6 bits that stands for 0
constexpr int ZERO = 128;                     // byte that stands for 0 in a row of integers
constexpr int KEYS = 16;                      // tokens of a KV block
constexpr int MAX_QUERIES = 4;                // queries that share a key while it is in registers
constexpr int CACHE_LINE = 64;                // bytes

// Number format of a weight matrix. A weight in SCALED4 or SCALED8 is scale * integer + offset, computed in float32 and
// rounded once; SHARED consecutive inputs of an output share a scale and an offset. A weight in FINE8 is scale * integer,
// rounded once; FINE consecutive inputs of an output share a scale in float32. In the SUPER formats, which hold GGUF's K
// quants, scales and offsets are products of an integer and a factor.
enum Format : int64_t {
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, SCALED4 = 4, SCALED8 = 5, FINE8 = 6, SCALED5 = 7, SUPER4 = 8,
    SUPER5 = 9, SUPER6 = 10
};

int64_t padded(int64_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

int64_t grouped(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

}  // namespace

// A linear layer. Layout of `weights`, zeros beyond `outputs`:
// - float32 and float16: [ceil(outputs / PANEL)][inputs][PANEL].
// - bfloat16: likewise, with the outputs of the panel's two halves interleaved, for fewer instructions.
// - int8: [ceil(outputs / PANEL)][ceil(inputs / GROUP)][PANEL][GROUP].
// - scaled: [ceil(outputs / PANEL)][inputs / SHARED], each with PANEL scales and PANEL offsets in binary16, then SHARED
//   times PANEL integers: signed bytes, or unsigned half bytes whose low halves are the panel's first outputs; of 5 bits
//   with the fifth bits of 4 inputs, a byte of each lane, in front of their half bytes.
// - super, 4 and 5 bits: for each SUPER inputs PANEL factors of scales and PANEL of offsets in binary16; then for each
//   SHARED of them PANEL scales and PANEL offsets in bytes, and the integers as in scaled.
// - super, 6 bits: for each SUPER inputs PANEL factors in binary16; then for each FINE of them PANEL scales in signed
//   bytes, and integers whose two upper bits are those of 2 inputs, a byte of each lane, in front of their half bytes.
// - fine: [ceil(outputs / PANEL)][inputs / FINE], each with PANEL scales in float32, then FINE times PANEL signed bytes.
struct Product {
    const void* weights;
    int64_t format;          // `Format` of `weights`
    const float* scales;     // [padded outputs] for int8 weights, else null
    const int32_t* offsets;  // [padded outputs]: ZERO times the sum of an output's weights for int8 weights, else null
    const float* bias;       // [padded outputs] or null
    int64_t inputs;
    int64_t outputs;
    const Product* rest;  // the outputs from `rest_from` on, which have another format; null: there are none
    int64_t rest_from;    // whole panels
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
    int64_t window;                // number of tokens that a token sees, itself included; 0: all before it
    int64_t mark;                  // extra numbers of each key and value, which mask position 0; 0: it is not masked
    float unseen;                  // last extra number of the keys at position 0; all other extra numbers are 0
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
    int64_t embedding_format;  // FLOAT32, BFLOAT16 or FLOAT16; of rows of a GGUF file their `Kind`
    int64_t embedding_row_bytes;  // bytes of a row of a GGUF file; 0: the table is none
    const float* cosines;      // [positions, head_dim]
    const float* sines;        // [positions, head_dim]
    const float* final_gains;  // [hidden]
    Product head;
    float epsilon;          // epsilon of the norms
    float qk_epsilon;       // epsilon of the norms of queries and keys
    float scaling;          // factor of attention scores
    const int64_t* tapped;  // [num_tapped], ascending: layers whose outputs are returned
    int64_t num_tapped;
    const DraftHead* draft_heads;  // heads whose features and KV a step writes
    int64_t num_draft_heads;
};

// A draft head: one decoder layer that reads a token's embedding and the feature of the position before it.
struct DraftHead {
    Model model;                 // a model of one layer, as wide as the target's; its qkv has twice the inputs
    Product features_of;         // from the outputs of the tapped layers, side by side, to a feature
    const int64_t* taps;         // [num_taps]: indices into the tapped layers
    int64_t num_taps;
    const float* feature_gains;  // [hidden]
    float* features;             // [slots, hidden]
    int64_t adds_normed;         // whether the residual is the feature after its norm (1) or before it (0)
    int64_t keeps_normed;        // whether a drafted token's feature is taken after the final norm (1) or before it (0)
};

struct Batch {
    int64_t tokens;
    int64_t sequences;
    int64_t logit_rows;
    const int64_t* first_row;     // [sequences + 1]: first row of each sequence; its rows are ordered by position
    const int64_t* start;         // [sequences]: position of each sequence's first row
    const int64_t* tables;        // block ids of all sequences
    const int64_t* table_offset;  // [sequences]: index of each sequence's first block id
    const int64_t* rows_wanted;   // [logit_rows]
    const int64_t* token_ids;     // [tokens]
    float* hidden;                // [tokens, hidden]; this and the next eight are working memory
    float* normed;                // [tokens, hidden]
    float* qkv;                   // [tokens, padded (heads + 2 * kv_heads) * head_dim]
    float* attended;              // [tokens, heads * head_dim]
    float* gate_up;               // [tokens, padded 2 * mlp]
    float* joined;                // [tokens, widest input of a draft head]
    uint8_t* integers;            // [tokens, 2 * widest inputs in whole groups]: rows as 16-bit integers, or the sums of
                                  // each FINE inputs in float32, which take less
    float* row_scales;            // [tokens]: scales of `integers`
    float* scores;                // [num_threads, MAX_QUERIES, longest context in whole blocks]
    int64_t scores_width;
    float* logits;   // [logit_rows, padded outputs of the head]
    float* outputs;  // [num_tapped, tokens, hidden]
};

// A multi-step draft: a batch, then steps of one token per sequence, each the argmax of the step before.
struct MultiStep {
    int64_t steps;          // number of steps, including the batch
    int64_t num_tokens;     // number of the head's outputs that can be chosen
    const int64_t* rows;    // [sequences + 1], ascending from 0
    const int64_t* starts;  // [steps - 1, sequences]: positions of each further step's tokens
    int64_t* token_ids;     // [steps, sequences]: the chosen tokens
    float* logits;          // [steps, sequences]: their logits
};
