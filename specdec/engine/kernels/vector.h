// Vectors of the processor's width, and the arithmetic that the kernels share.
//
// Most of it uses GCC's vector types, which compile for any processor. Operations that they cannot express, such as a
// fused multiply-add, use intrinsics. Included by `layout.h`.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Number of floats in the processor's widest vector; GCC emulates vectors on processors without them.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

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

// Loads the bytes of a vector of integers.
inline Integers load_bytes(const int8_t* from) {
    Integers vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// 16-bit numbers as types of their own: the upper half of a float32 (bfloat16), and IEEE 754's binary16.
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float float_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// Intrinsics, because GCC converts these vectors lane by lane.
inline Vector load(const Bfloat16* from) {
#if defined(__AVX512F__)
    __m256i halves;
    std::memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(__AVX2__)
    __m128i halves;
    std::memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#elif defined(__aarch64__)
    uint16x4_t halves;
    std::memcpy(&halves, from, sizeof halves);
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
#else
    Vector vector;
    for (int lane = 0; lane < LANES; ++lane) vector[lane] = float_of(static_cast<uint32_t>(from[lane].bits) << 16);
    return vector;
#endif
}

// Loads two interleaved vectors: the lower halves of the words are the first, the upper halves the second.
inline void load_paired(const Bfloat16* from, Vector& first, Vector& second) {
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    Words words;
    std::memcpy(&words, from, sizeof words);
    first = reinterpret_cast<Vector>(words << 16);
    second = reinterpret_cast<Vector>(words & 0xffff0000u);
}

inline Vector load(const Float16* from) {
#if defined(__AVX512F__)
    __m256i halves;
    std::memcpy(&halves, from, sizeof halves);
    return _mm512_cvtph_ps(halves);
#elif defined(__F16C__) && defined(__AVX2__)
    __m128i halves;
    std::memcpy(&halves, from, sizeof halves);
    return _mm256_cvtph_ps(halves);
#elif defined(__aarch64__)
    float16x4_t halves;
    std::memcpy(&halves, from, sizeof halves);
    return vcvt_f32_f16(halves);
#else
    // After the shift the exponent is 112 too small; infinities and NaNs get the largest exponent instead.
    Vector vector;
    for (int lane = 0; lane < LANES; ++lane) {
        const uint32_t sign = (from[lane].bits & 0x8000u) << 16, rest = (from[lane].bits & 0x7fffu) << 13;
        const float size = rest < 0x7c00u << 13 ? float_of(rest) * 0x1p112f : float_of(rest | 0x7f800000u);
        vector[lane] = sign ? -size : size;
    }
    return vector;
#endif
}

// Loads signed bytes as floats.
inline Vector load_signed(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Vector vector;
    for (int lane = 0; lane < LANES; ++lane) vector[lane] = from[lane];
    return vector;
#endif
}

// Loads unsigned bytes as integers.
inline Integers load_unsigned(const uint8_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Integers>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<Integers>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Integers vector;
    for (int lane = 0; lane < LANES; ++lane) vector[lane] = from[lane];
    return vector;
#endif
}

// Returns the lowest four bits of integers as floats.
inline Vector lowest_bits(Integers integers) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(integers), numbers);
#else
    return __builtin_convertvector(integers & 15, Vector);
#endif
}

inline Vector as_floats(Integers integers) { return __builtin_convertvector(integers, Vector); }

inline void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

inline Vector broadcast(float value) { return value - Vector{}; }

// a * b + c, rounded once if the processor supports it. This is not left to the compiler (`-ffp-contract=off`), which
// fuses in some instances of a loop and not in others, so that a row could round differently alone and among other
// rows.
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

// Lane numbers for adding halves of two vectors: segments of WIDTH lanes, alternately of x and of y, and of each
// segment the half that begins at OFFSET. Lane numbers of y begin at LANES.
template <int WIDTH, int OFFSET, int... LANE>
constexpr Integers halves(std::integer_sequence<int, LANE...>) {
    constexpr int half = WIDTH / 2;
    return Integers{LANE / half % 2 * LANES + LANE / WIDTH * WIDTH + OFFSET + LANE % half...};
}

// Sums each of LANES vectors: lane i of the result is the sum of vectors[i]. Halves are added to halves, so the order
// of the additions does not depend on i.
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

// e^x to about one unit in the last place, over the range of float: 2^n * p(r) with |r| <= ln 2 / 2, where p is the
// Taylor polynomial of degree 7 (its next term is below 2^-27).
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
