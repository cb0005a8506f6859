// One step of a Llama-shaped decoder on a CPU: every layer over a ragged, paged batch, in one call.
//
// A step of few rows is bound by reading the weights once; what a tensor library adds around that (an operation a
// dozen times a layer, weights in a layout for many rows, copies of keys and values) costs more than the reading.
// Here weights lie in panels in the order in which they are read, and attention reads the cache's blocks in place.
//
// A row's result has the same bits whatever else is in the batch: each output is summed over its inputs one after the
// other, each query over its own keys, and neither order knows the number of rows, their place or the thread. Where a
// product and a sum are rounded once is said here too (`multiply_add`). What is no number spreads further than that: to
// all rows of its sequence in the step.
//
// Not here: which token comes next, who owns which block. Called through the C interface at the end, from
// `specdec.engine.native.runner`, which lays the structures out; nothing is allocated here. A step belongs to one
// thread; with OpenMP its loops are shared among `num_threads`.

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Lanes of the widest float vector of this machine; `Vector` also works where there is none.
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MAX_ROWS = 8;       // rows of one product that share the panel's weights while they are in registers
constexpr int MAX_INT8_ROWS = 6;  // each keeps two sums
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int MAX_ROWS = 4;
constexpr int MAX_INT8_ROWS = 2;
#else
constexpr int LANES = 4;
constexpr int MAX_ROWS = 8;
constexpr int MAX_INT8_ROWS = 2;
#endif
constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = LANES * PANEL_VECTORS;  // outputs side by side in a panel
constexpr int MAX_QUERIES = 4;                // queries that share a key while it is in registers
constexpr int KEYS = 16;                      // tokens of a KV block
constexpr int GROUP = 4;                      // inputs of int8 weights that are multiplied and summed at once

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Vector load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline Integers load(const int32_t* from) {
    Integers vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// The bytes of a vector of integers.
inline Integers load_bytes(const int8_t* from) {
    Integers vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

inline Vector broadcast(float value) { return value - Vector{}; }

// a * b + c, rounded once where the processor can. Said and not left to the compiler (`-ffp-contract=off`): it fuses
// here and not there, by its own tuning, and a row alone and rows in company run through different instances of a loop.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline float largest(Vector vector) {
    float most = vector[0];
    for (int lane = 1; lane < LANES; ++lane) most = vector[lane] > most ? vector[lane] : most;
    return most;
}

// Where the sums of two vectors' halves come from: segments of WIDTH lanes, one of x and one of y in turn; of each the
// half that begins at OFFSET. Lane numbers of y begin at LANES.
template <int WIDTH, int OFFSET, int... LANE>
constexpr Integers halves(std::integer_sequence<int, LANE...>) {
    constexpr int half = WIDTH / 2;
    return Integers{LANE / half % 2 * LANES + LANE / WIDTH * WIDTH + OFFSET + LANE % half...};
}

// Sums each of LANES vectors: lane i of the result is the sum of vectors[i]. Halves are added to halves, so the order
// within a sum does not depend on i.
template <int WIDTH = LANES>
inline Vector sums(Vector* vectors) {
    if constexpr (WIDTH == 1) {
        return vectors[0];
    } else {
        constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
        constexpr Integers low = halves<WIDTH, 0>(lanes), high = halves<WIDTH, WIDTH / 2>(lanes);
#pragma GCC unroll 8
        for (int at = 0; at < WIDTH / 2; ++at) {
            const Vector x = vectors[at], y = vectors[at + WIDTH / 2];
            vectors[at] = __builtin_shuffle(x, y, low) + __builtin_shuffle(x, y, high);
        }
        return sums<WIDTH / 2>(vectors);
    }
}

inline float sum(Vector vector) {
    float lanes[LANES];
    store(lanes, vector);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// e^x to about one unit in the last place for x <= 0 and as far as float reaches above: 2^n * p(r), |r| <= ln 2 / 2,
// p the Taylor polynomial of degree 7 (its next term is below 2^-27).
inline Vector exponential(Vector x) {
    const Vector lowest = broadcast(-87.0f), highest = broadcast(88.0f);
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = multiply_add(x, broadcast(1.44269504f), magic) - magic;
    Vector r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    Vector p = broadcast(1.0f / 5040);
    p = multiply_add(p, r, broadcast(1.0f / 720));
    p = multiply_add(p, r, broadcast(1.0f / 120));
    p = multiply_add(p, r, broadcast(1.0f / 24));
    p = multiply_add(p, r, broadcast(1.0f / 6));
    p = multiply_add(p, r, broadcast(0.5f));
    p = multiply_add(p, r, broadcast(1.0f));
    p = multiply_add(p, r, broadcast(1.0f));
    const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector power;
    std::memcpy(&power, &exponent, sizeof power);
    return p * power;
}

}  // namespace

extern "C" {

// A linear layer. `weights` is [ceil(outputs / PANEL)][inputs][PANEL], zeros beyond `outputs`; of int8 weights
// [ceil(outputs / PANEL)][ceil(inputs / GROUP)][PANEL][GROUP].
struct Product {
    const void* weights;     // float32, or int8 where `scales` is set
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
    float* cache;                  // [slots, 2 * kv_heads * head_dim]: keys of all heads, then values
    int64_t window;                // tokens that a token sees, itself included; 0: all before it
};

struct Model {
    const Layer* layers;
    int64_t num_layers;
    int64_t hidden;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t mlp;
    const float* embeddings;   // [rows of the table, hidden]
    const float* cosines;      // [positions, head_dim]
    const float* sines;        // [positions, head_dim]
    const float* final_gains;  // [hidden]
    Product head;
    float epsilon;     // of the norms
    float qk_epsilon;  // of the norms of queries and keys
    float scaling;     // of attention scores
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
    float* hidden;                // [tokens, hidden]: scratch, as are the next five
    float* normed;                // [tokens, hidden]
    float* qkv;                   // [tokens, padded (heads + 2 * kv_heads) * head_dim]
    float* attended;              // [tokens, heads * head_dim]
    float* gate_up;               // [tokens, padded 2 * mlp]
    uint8_t* high;                // [tokens, widest inputs in whole groups]: of rows as integers, as the next two
    uint8_t* low;                 // the same
    float* row_scales;            // [tokens]
    float* scores;                // [num_threads, MAX_QUERIES, longest context in whole blocks]
    int64_t scores_width;
    float* logits;  // [logit_rows, padded outputs of the head]
};
}

namespace {

int64_t padded(int64_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

enum class Into { store, add };

// y = or += result of one row and one vector of outputs.
inline void put(const Product& product, int64_t output, Vector result, float* y, Into into) {
    if (product.bias) result += load(product.bias + output);
    store(y + output, into == Into::add ? load(y + output) + result : result);
}

// ROWS rows of x times one panel. Weights are read once and stay in registers for all rows.
template <int ROWS>
void multiply_rows(const Product& product, int64_t panel, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                   Into into) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    const float* from = static_cast<const float*>(product.weights) + panel * product.inputs * PANEL;
    for (int64_t input = 0; input < product.inputs; ++input, from += PANEL) {
        Vector weights[PANEL_VECTORS];
        for (int part = 0; part < PANEL_VECTORS; ++part) weights[part] = load(from + part * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Vector value = broadcast(x[row * x_stride + input]);
            for (int part = 0; part < PANEL_VECTORS; ++part) sums[row][part] = multiply_add(value, weights[part], sums[row][part]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part)
            put(product, panel * PANEL + part * LANES, sums[row][part], y + row * y_stride, into);
}

void multiply_panel(const Product& product, int64_t panel, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, Into into) {
    while (rows > 0) {
        int done = 1;
#define SPECDEC_ROWS(n)                                                     \
    if (n <= MAX_ROWS && rows >= n) {                                       \
        multiply_rows<n>(product, panel, x, x_stride, y, y_stride, into);   \
        done = n;                                                           \
    } else
        SPECDEC_ROWS(8)
        SPECDEC_ROWS(7)
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_rows<1>(product, panel, x, x_stride, y, y_stride, into);
#undef SPECDEC_ROWS
        rows -= done;
        x += done * x_stride;
        y += done * y_stride;
    }
}

// int8 weights are multiplied with rows of 16-bit integers, x = scale * (256 * (high - ZERO) + low), each a byte.
// Processors multiply bytes of 0..255 with bytes of -127..127 and sum four products in one instruction, and sums of
// integers are exact: the same bits on every processor, in any company. The rounding, 1 / 65,024 of a row's largest
// number at most, is finer than that of the weights by far.
constexpr int ZERO = 128;
constexpr float LARGEST_ROUNDED = 127 * 256;

int64_t grouped(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

// x * factor to the nearest integers.
inline Integers rounded(Vector x, float factor) {
    const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return __builtin_convertvector(multiply_add(x, broadcast(factor), magic) - magic, Integers);
}

inline void put_halves(Integers numbers, uint8_t* high, uint8_t* low) {
    const Bytes highs = __builtin_convertvector((numbers >> 8) + ZERO, Bytes);
    const Bytes lows = __builtin_convertvector(numbers & 255, Bytes);
    std::memcpy(high, &highs, sizeof highs);
    std::memcpy(low, &lows, sizeof lows);
}

// A row as integers in whole groups; returns its scale, not a number where the row has an entry that is none or infinite.
float round_row(const float* x, int64_t inputs, uint8_t* high, uint8_t* low) {
    Vector most = {}, zeros = {};
    float tail[LANES] = {};  // the last, incomplete vector
    const int64_t whole = inputs / LANES * LANES;
    std::memcpy(tail, x + whole, (inputs - whole) * sizeof(float));
    for (int64_t at = 0; at <= whole; at += LANES) {
        const Vector numbers = load(at < whole ? x + at : tail);
        const Vector sizes = numbers < 0.0f ? -numbers : numbers;
        most = sizes > most ? sizes : most;
        zeros += numbers * 0.0f;
    }
    const float longest = largest(most);
    // Smaller rows count as 0: the inverse of their scale would be infinite.
    const float inverse = longest > 1e-30f ? LARGEST_ROUNDED / longest : 0.0f;
    for (int64_t at = 0; at < whole; at += LANES) put_halves(rounded(load(x + at), inverse), high + at, low + at);
    uint8_t tail_high[LANES], tail_low[LANES];
    put_halves(rounded(load(tail), inverse), tail_high, tail_low);
    std::memcpy(high + whole, tail_high, grouped(inputs) - whole);
    std::memcpy(low + whole, tail_low, grouped(inputs) - whole);
    return longest / LARGEST_ROUNDED + sum(zeros);
}

// sums + the four products of each lane's bytes.
inline Integers dot(Integers sums, Integers bytes, Integers weights) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                          reinterpret_cast<__m512i>(bytes),
                                                          reinterpret_cast<__m512i>(weights)));
#else
    for (int byte = 0; byte < GROUP; ++byte)
        sums += (weights << (24 - 8 * byte) >> 24) * (bytes >> (8 * byte) & 255);
    return sums;
#endif
}

inline Integers broadcast_group(const uint8_t* from) {
    int32_t group;
    std::memcpy(&group, from, sizeof group);
    return group - Integers{};
}

template <int ROWS>
void multiply_int8_rows(const Product& product, int64_t panel, const Batch& batch, int64_t first_row, float* y,
                        int64_t y_stride, Into into) {
    const int64_t stride = grouped(product.inputs);
    const uint8_t *high = batch.high + first_row * stride, *low = batch.low + first_row * stride;
    Integers highs[ROWS][PANEL_VECTORS] = {}, lows[ROWS][PANEL_VECTORS] = {};
    const int8_t* from = static_cast<const int8_t*>(product.weights) + panel * stride * PANEL;
    for (int64_t input = 0; input < stride; input += GROUP, from += PANEL * GROUP) {
        Integers weights[PANEL_VECTORS];
        for (int part = 0; part < PANEL_VECTORS; ++part) weights[part] = load_bytes(from + part * LANES * GROUP);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Integers high_group = broadcast_group(high + row * stride + input);
            const Integers low_group = broadcast_group(low + row * stride + input);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                highs[row][part] = dot(highs[row][part], high_group, weights[part]);
                lows[row][part] = dot(lows[row][part], low_group, weights[part]);
            }
        }
    }
    // Unrolled, here and where rows of floats end, for the sums to stay in registers before.
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            const int64_t output = panel * PANEL + part * LANES;
            const Integers high_sum = highs[row][part] - load(product.offsets + output);
            const Vector sum = __builtin_convertvector(high_sum, Vector) * 256.0f +
                               __builtin_convertvector(lows[row][part], Vector);
            const Vector scales = load(product.scales + output) * batch.row_scales[first_row + row];
            put(product, output, sum * scales, y + row * y_stride, into);
        }
}

void multiply_int8_panel(const Product& product, int64_t panel, const Batch& batch, int64_t rows, float* y,
                         int64_t y_stride, Into into) {
    for (int64_t row = 0; row < rows;) {
        int done = 1;
        float* to = y + row * y_stride;
#define SPECDEC_ROWS(n)                                                          \
    if (n <= MAX_INT8_ROWS && rows - row >= n) {                                 \
        multiply_int8_rows<n>(product, panel, batch, row, to, y_stride, into);   \
        done = n;                                                                \
    } else
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_int8_rows<1>(product, panel, batch, row, to, y_stride, into);
#undef SPECDEC_ROWS
        row += done;
    }
}

// y [rows, y_stride] = or += x [rows, x_stride] W^T + bias. Ends with all threads together.
void apply(const Product& product, const Batch& batch, const float* x, int64_t x_stride, int64_t rows, float* y,
           int64_t y_stride, Into into) {
    const int64_t panels = padded(product.outputs) / PANEL;
    if (!product.scales) {
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel)
            multiply_panel(product, panel, x, x_stride, rows, y, y_stride, into);
        return;
    }
    const int64_t stride = grouped(product.inputs);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        batch.row_scales[row] =
            round_row(x + row * x_stride, product.inputs, batch.high + row * stride, batch.low + row * stride);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        multiply_int8_panel(product, panel, batch, rows, y, y_stride, into);
}

// to = x / rms(x) * gains over `width` numbers.
void normalise(const float* x, const float* gains, int64_t width, float epsilon, float* to) {
    Vector squares{};
    for (int64_t at = 0; at < width; at += LANES) squares = multiply_add(load(x + at), load(x + at), squares);
    const float mean = sum(squares) / static_cast<float>(width);
    const Vector scale = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t at = 0; at < width; at += LANES) store(to + at, load(x + at) * scale * load(gains + at));
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

// Queries that read the same keys: rows of one sequence, heads of one group.
struct Queries {
    int count;
    const float* query[MAX_QUERIES];
    float* output[MAX_QUERIES];
    int64_t position[MAX_QUERIES];
};

// The keys and values of one sequence and KV head in the cache.
struct Cached {
    const float* rows;
    const int64_t* table;
    int64_t stride;  // between tokens
    int64_t values;  // from a token's key to its value

    const float* block(int64_t key) const { return rows + table[key / KEYS] * KEYS * stride; }
};

// scores[q][key - begin] = query . key for whole blocks of keys; what lies beyond the last token is garbage.
template <int DIM_VECTORS, int COUNT>
void score(const Cached& cached, const Queries& queries, int64_t begin, int64_t end, float* scores, int64_t width) {
    for (int64_t first = begin; first < end; first += LANES) {
        const float* keys = cached.block(first) + first % KEYS * cached.stride;
        for (int q = 0; q < COUNT; ++q) {
            Vector products[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; ++key) {
                products[key] = load(keys + key * cached.stride) * load(queries.query[q]);
                for (int part = 1; part < DIM_VECTORS; ++part)
                    products[key] = multiply_add(load(keys + key * cached.stride + part * LANES),
                                                 load(queries.query[q] + part * LANES), products[key]);
            }
            store(scores + q * width + first - begin, sums(products));
        }
    }
}

// Scores of what a query sees become weights that sum to 1, all others 0.
void weigh(float* row, int64_t visible_from, int64_t visible_to, int64_t count, float scaling) {
    // Other queries of the tile may see these.
    for (int64_t key = 0; key < visible_from; ++key) row[key] = -__builtin_inff();
    for (int64_t key = visible_to; key < count; ++key) row[key] = -__builtin_inff();
    Vector maxima = broadcast(row[visible_from]);
    for (int64_t at = 0; at < count; at += LANES) {
        const Vector score = load(row + at);
        maxima = score > maxima ? score : maxima;
    }
    const float highest = largest(maxima);
    Vector total{};
    for (int64_t at = 0; at < count; at += LANES) {
        const Vector score = load(row + at);
        Vector weight = exponential((score - broadcast(highest)) * broadcast(scaling));
        weight = score == -__builtin_inff() ? Vector{} : weight;
        store(row + at, weight);
        total += weight;
    }
    const Vector factor = broadcast(1.0f / sum(total));
    for (int64_t at = 0; at < count; at += LANES) store(row + at, load(row + at) * factor);
}

template <int DIM_VECTORS, int COUNT>
void attend(const Cached& cached, const Queries& queries, int64_t window, float scaling, float* scores, int64_t width) {
    int64_t first = INT64_MAX, last = 0;
    int64_t lowest[COUNT];
    for (int q = 0; q < COUNT; ++q) {
        const int64_t position = queries.position[q];
        lowest[q] = window && position >= window ? position - window + 1 : 0;
        first = lowest[q] < first ? lowest[q] : first;
        last = position > last ? position : last;
    }
    const int64_t begin = first / KEYS * KEYS, end = last + 1, count = (end - begin + KEYS - 1) / KEYS * KEYS;
    score<DIM_VECTORS, COUNT>(cached, queries, begin, end, scores, width);
    for (int q = 0; q < COUNT; ++q)
        weigh(scores + q * width, lowest[q] - begin, queries.position[q] + 1 - begin, count, scaling);
    Vector outputs[COUNT][DIM_VECTORS] = {};
    for (int64_t key = begin; key < end; ++key) {
        const float* value = cached.block(key) + key % KEYS * cached.stride + cached.values;
        for (int q = 0; q < COUNT; ++q) {
            const Vector weight = broadcast(scores[q * width + key - begin]);
            for (int part = 0; part < DIM_VECTORS; ++part)
                outputs[q][part] = multiply_add(weight, load(value + part * LANES), outputs[q][part]);
        }
    }
    for (int q = 0; q < COUNT; ++q)
        for (int part = 0; part < DIM_VECTORS; ++part) store(queries.output[q] + part * LANES, outputs[q][part]);
}

template <int DIM_VECTORS>
void attend_tile(const Cached& cached, const Queries& queries, int64_t window, float scaling, float* scores,
                 int64_t width) {
    switch (queries.count) {
        case 1: return attend<DIM_VECTORS, 1>(cached, queries, window, scaling, scores, width);
        case 2: return attend<DIM_VECTORS, 2>(cached, queries, window, scaling, scores, width);
        case 3: return attend<DIM_VECTORS, 3>(cached, queries, window, scaling, scores, width);
        default: return attend<DIM_VECTORS, 4>(cached, queries, window, scaling, scores, width);
    }
}

using Attend = void (*)(const Cached&, const Queries&, int64_t, float, float*, int64_t);

Attend attend_of(int64_t head_dim) {
    switch (head_dim / LANES) {
        case 1: return attend_tile<1>;
        case 2: return attend_tile<2>;
        case 3: return attend_tile<3>;
        case 4: return attend_tile<4>;
        case 5: return attend_tile<5>;
        case 6: return attend_tile<6>;
        case 8: return attend_tile<8>;
        case 10: return attend_tile<10>;
        case 12: return attend_tile<12>;
        case 16: return attend_tile<16>;
        case 32: return attend_tile<32>;
        default: return nullptr;
    }
}

void attend_all(const Model& model, const Layer& layer, const Batch& batch, float* scores) {
    const int64_t dim = model.head_dim, group = model.heads / model.kv_heads, stride = padded(layer.qkv.outputs);
    const Attend attend_queries = attend_of(dim);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
        for (int64_t kv_head = 0; kv_head < model.kv_heads; ++kv_head) {
            const Cached cached{layer.cache + kv_head * dim, batch.tables + batch.table_offset[sequence],
                                2 * model.kv_heads * dim, model.kv_heads * dim};
            Queries queries{};
            for (int64_t row = batch.first_row[sequence]; row < batch.first_row[sequence + 1]; ++row)
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                    queries.query[queries.count] = batch.qkv + row * stride + head * dim;
                    queries.output[queries.count] = batch.attended + (row * model.heads + head) * dim;
                    queries.position[queries.count] = batch.start[sequence] + row - batch.first_row[sequence];
                    const bool is_last = row + 1 == batch.first_row[sequence + 1] && head + 1 == (kv_head + 1) * group;
                    if (++queries.count == MAX_QUERIES || is_last) {
                        attend_queries(cached, queries, layer.window, model.scaling, scores, batch.scores_width);
                        queries.count = 0;
                    }
                }
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

}  // namespace

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

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
            std::memcpy(batch->hidden + row * model->hidden, model->embeddings + batch->token_ids[row] * model->hidden,
                        model->hidden * sizeof(float));
        for (int64_t layer = 0; layer < model->num_layers; ++layer)
            run_layer(*model, model->layers[layer], *batch, scores);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < batch->logit_rows; ++row)
            normalise(batch->hidden + batch->rows_wanted[row] * model->hidden, model->final_gains, model->hidden,
                      model->epsilon, batch->normed + row * model->hidden);
        apply(model->head, *batch, batch->normed, model->hidden, batch->logit_rows, batch->logits, padded(model->head.outputs),
              Into::store);
    }
}
}
