// Rows times int8 weights in panels: y = or += x W^T + bias.
//
// Each row is rounded to 16-bit integers with its own scale, x = scale * (256 * high + low). The rounding error is at
// most 1 / 65,024 of the row's largest number, much less than that of the weights. Integer sums are exact, so the
// result has the same bits on every processor, with every instruction and among any other rows. Included by
// `products.h`.

#pragma once

#include "panels.h"

namespace {

constexpr float LARGEST_ROUNDED = 127 * 256;

// Rows are stored as 16-bit numbers on processors that multiply those but not bytes, otherwise as bytes. Tests define
// SPECDEC_AS_BYTES, which stores bytes on all processors, to compare both ways.
#if !defined(SPECDEC_AS_BYTES) && \
    ((defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (defined(__AVX2__) && !defined(__AVX512F__)))
#define SPECDEC_AS_NUMBERS
constexpr bool AS_NUMBERS = true;
#else
constexpr bool AS_NUMBERS = false;
#endif

// Rows of one product that share the panel's weights while they are in registers.
constexpr int MAX_INT8_ROWS = AS_NUMBERS || LANES == 16 ? 6 : 2;

// x * factor, rounded to the nearest integers.
inline Integers rounded(Vector x, float factor) {
    const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return __builtin_convertvector(multiply_add(x, broadcast(factor), magic) - magic, Integers);
}

// Writes one row of `Batch::integers` from input `at` on: 16-bit numbers, or the high bytes of all inputs (plus ZERO,
// so 0..255) followed by the low bytes of all inputs.
template <class Lanes>
void put_integers(Lanes numbers, int64_t at, int64_t stride, uint8_t* row) {
    constexpr int count = sizeof numbers / sizeof(int32_t);
    if constexpr (AS_NUMBERS) {
        typedef int16_t Numbers __attribute__((vector_size(count * 2)));
        const Numbers shorter = __builtin_convertvector(numbers, Numbers);
        std::memcpy(row + 2 * at, &shorter, sizeof shorter);
    } else {
        typedef int8_t Halves __attribute__((vector_size(count)));
        const Halves high = __builtin_convertvector((numbers >> 8) + ZERO, Halves);
        const Halves low = __builtin_convertvector(numbers & 255, Halves);
        std::memcpy(row + at, &high, sizeof high);
        std::memcpy(row + stride + at, &low, sizeof low);
    }
}

// Writes a row as integers in whole groups and returns its scale, which is NaN if an entry is NaN or infinite.
float round_row(const float* x, int64_t inputs, uint8_t* row) {
    Vector most = {}, zeros = {};
    float tail[LANES] = {};  // the last, incomplete vector
    const int64_t whole = inputs / LANES * LANES, stride = grouped(inputs);
    std::memcpy(tail, x + whole, (inputs - whole) * sizeof(float));
    for (int64_t at = 0; at <= whole; at += LANES) {
        const Vector numbers = load(at < whole ? x + at : tail);
        const Vector sizes = numbers < 0.0f ? -numbers : numbers;
        most = sizes > most ? sizes : most;
        zeros += numbers * 0.0f;
    }
    const float longest = largest(most);
    // Rows with smaller numbers count as 0 because the inverse of their scale would be infinite.
    const float inverse = longest > 1e-30f ? LARGEST_ROUNDED / longest : 0.0f;
    for (int64_t at = 0; at < whole; at += LANES) put_integers(rounded(load(x + at), inverse), at, stride, row);
    typedef int32_t Group __attribute__((vector_size(GROUP * 4)));
    const Integers last = rounded(load(tail), inverse);
    for (int64_t at = whole; at < stride; at += GROUP) {
        Group group;
        std::memcpy(&group, reinterpret_cast<const int32_t*>(&last) + (at - whole), sizeof group);
        put_integers(group, at, stride, row);
    }
    return longest / LARGEST_ROUNDED + sum(zeros);
}

// Writes one vector of outputs from `high` and `low`, the sums over the high and the low bytes of a row.
inline void put_sums(const Product& product, int64_t output, Integers high, Integers low, float row_scale, float* y,
                     Into into) {
    high += low >> 8;
    const Vector sum = __builtin_convertvector(high, Vector) * 256.0f + __builtin_convertvector(low & 255, Vector);
    put(product, output, sum * (load(product.scales + output) * row_scale), y, into);
}

#ifdef SPECDEC_AS_NUMBERS

#if defined(__AVX512BW__)
typedef __m512i Numbers;
inline Numbers load_numbers(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Numbers broadcast_numbers(int64_t group) { return _mm512_set1_epi64(group); }
inline Integers pair_sums(Numbers a, Numbers b) { return reinterpret_cast<Integers>(_mm512_madd_epi16(a, b)); }
#else
typedef __m256i Numbers;
inline Numbers load_numbers(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Numbers broadcast_numbers(int64_t group) { return _mm256_set1_epi64x(group); }
inline Integers pair_sums(Numbers a, Numbers b) { return reinterpret_cast<Integers>(_mm256_madd_epi16(a, b)); }
#endif

// Number of inputs whose products fit into a lane's sum: a lane takes two of each GROUP, and neighbours are added.
constexpr int64_t SUMMABLE_INPUTS = 512;
static_assert(SUMMABLE_INPUTS * 127 * 32768 < INT32_MAX);

// Vectors of outputs that are summed at once, so that the sums of all rows stay in 16 registers.
template <int ROWS>
constexpr int PARTS = LANES == 8 && ROWS > 2 ? 1 : PANEL_VECTORS;

// Sums of neighbouring lanes: those of x, then those of y.
template <int... LANE>
inline Integers neighbour_sums(Integers x, Integers y, std::integer_sequence<int, LANE...>) {
    return __builtin_shuffle(x, y, Integers{2 * LANE...}) + __builtin_shuffle(x, y, Integers{2 * LANE + 1 ...});
}

// Always inlined, because GCC 12 would keep the sums of six rows in memory for a call.
template <int ROWS>
[[gnu::always_inline]] inline void sum_products(const int8_t* weights, const uint8_t* integers, int64_t stride,
                                                Integers (&high)[ROWS][PARTS<ROWS>],
                                                Integers (&low)[ROWS][PARTS<ROWS>]) {
    for (int64_t begin = 0; begin < stride; begin += SUMMABLE_INPUTS) {
        const int64_t end = begin + SUMMABLE_INPUTS < stride ? begin + SUMMABLE_INPUTS : stride;
        Integers sums[ROWS][PARTS<ROWS>][2] = {};  // two lanes per output, hence two vectors
        for (int64_t input = begin; input < end; input += GROUP) {
            const int8_t* from = weights + input * PANEL;
            if constexpr (ROWS >= ROWS_TO_ASK_FOR_SHORT) ask_ahead<PANEL * GROUP>(from);
            Numbers some[2 * PARTS<ROWS>];
#pragma GCC unroll 4
            for (int at = 0; at < 2 * PARTS<ROWS>; ++at) some[at] = load_numbers(from + at * (LANES / 2) * GROUP);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                int64_t numbers;
                std::memcpy(&numbers, integers + 2 * (row * stride + input), sizeof numbers);
                const Numbers group = broadcast_numbers(numbers);
#pragma GCC unroll 4
                for (int at = 0; at < 2 * PARTS<ROWS>; ++at) sums[row][at / 2][at % 2] += pair_sums(group, some[at]);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS<ROWS>; ++part) {
                const Integers sum = neighbour_sums(sums[row][part][0], sums[row][part][1],
                                                    std::make_integer_sequence<int, LANES>{});
                high[row][part] += sum >> 8;
                low[row][part] += sum & 255;
            }
    }
}

#else

template <int ROWS>
constexpr int PARTS = PANEL_VECTORS;

// sums + the four products of each lane's bytes: unsigned `bytes` (0..255) times signed `weights` (-127..127).
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
[[gnu::always_inline]] inline void sum_products(const int8_t* weights, const uint8_t* integers, int64_t stride,
                                                Integers (&high)[ROWS][PARTS<ROWS>],
                                                Integers (&low)[ROWS][PARTS<ROWS>]) {
    const uint8_t *high_bytes = integers, *low_bytes = integers + stride;
    const int64_t row_bytes = 2 * stride;
    for (int64_t input = 0; input < stride; input += GROUP, weights += PANEL * GROUP) {
        if constexpr (ROWS >= ROWS_TO_ASK_FOR_SHORT) ask_ahead<PANEL * GROUP>(weights);
        Integers group[PANEL_VECTORS];
        for (int part = 0; part < PANEL_VECTORS; ++part) group[part] = load_bytes(weights + part * LANES * GROUP);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Integers high_group = broadcast_group(high_bytes + row * row_bytes + input);
            const Integers low_group = broadcast_group(low_bytes + row * row_bytes + input);
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                high[row][part] = dot(high[row][part], high_group, group[part]);
                low[row][part] = dot(low[row][part], low_group, group[part]);
            }
        }
    }
}

#endif

template <int ROWS>
void multiply_int8_rows(const Product& product, int64_t panel, const Batch& batch, int64_t first_row, float* y,
                        int64_t y_stride, Into into) {
    const int64_t stride = grouped(product.inputs);
    const uint8_t* integers = batch.integers + first_row * 2 * stride;
    const int8_t* weights = static_cast<const int8_t*>(product.weights) + panel * stride * PANEL;
    for (int first = 0; first < PANEL_VECTORS; first += PARTS<ROWS>) {
        Integers high[ROWS][PARTS<ROWS>] = {}, low[ROWS][PARTS<ROWS>] = {};
        sum_products<ROWS>(weights + first * LANES * GROUP, integers, stride, high, low);
        // Unrolled, as at the end of `multiply_rows`, so that the sums stay in registers.
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS<ROWS>; ++part) {
                const int64_t output = panel * PANEL + (first + part) * LANES;
                if constexpr (!AS_NUMBERS) high[row][part] -= load(product.offsets + output);
                put_sums(product, output, high[row][part], low[row][part], batch.row_scales[first_row + row],
                         y + row * y_stride, into);
            }
    }
}

void multiply_int8_panel(const Product& product, int64_t panel, const Batch& batch, int64_t rows, float* y,
                         int64_t y_stride, Into into) {
    for (int64_t row = 0; row < rows;) {
        const int64_t sharing = rows_sharing(rows - row, MAX_INT8_ROWS);
        float* to = y + row * y_stride;
#define SPECDEC_ROWS(n)                                                        \
    if (n <= MAX_INT8_ROWS && sharing == n)                                    \
        multiply_int8_rows<n>(product, panel, batch, row, to, y_stride, into); \
    else
        SPECDEC_ROWS(6)
        SPECDEC_ROWS(5)
        SPECDEC_ROWS(4)
        SPECDEC_ROWS(3)
        SPECDEC_ROWS(2)
        multiply_int8_rows<1>(product, panel, batch, row, to, y_stride, into);
#undef SPECDEC_ROWS
        row += sharing;
    }
}

}  // namespace
