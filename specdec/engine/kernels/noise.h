// The coupled choice of a row: argmax of log probability + Gumbel noise, with a key for each token.
//
// exp(noise) = 1 / -log(u) is at most 1 / (1 - u), which follows from the upper 32 of the 52 bits of u. A token whose
// bound is below the best score so far cannot win, so nearly all tokens need no logarithm.
//
// Included by `step.cpp`; called through it from `specdec.engine.logits.kernel_choices`.

#pragma once

#include <cmath>

#include "vector.h"

namespace {

// 32-bit words in lanes of 64 bits, whose upper halves are undefined.
constexpr int WORDS = LANES / 2;
typedef uint64_t Words __attribute__((vector_size(WORDS * 8)));
typedef int64_t Places __attribute__((vector_size(WORDS * 8)));
typedef double Doubles __attribute__((vector_size(WORDS * 8)));

constexpr uint32_t MULTIPLIERS[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t KEY_STEPS[2] = {0x9E3779B9, 0xBB67AE85};
constexpr uint64_t COUPLED = 5;  // specdec.core.random.Stream.COUPLED
constexpr double SLACK = 1e-9;   // relative slack for rounding

// Key of the noise, besides the token.
struct NoiseKey {
    uint32_t low_seed, high_seed, turn, position;
};

// Products of the lower 32 bits.
inline Words multiply(Words a, Words b) {
#if defined(__AVX512F__)
    return (Words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}

// Whether any lane of a comparison holds.
inline bool has_any(Places comparison) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)comparison, (__m512i)comparison) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)comparison, (__m256i)comparison);
#else
    int64_t any = 0;
    for (int lane = 0; lane < WORDS; ++lane) any |= comparison[lane];
    return any != 0;
#endif
}

// Ten rounds of Philox4x32 (Salmon et al. 2011, section 3.3), as `specdec.core.random.philox4x32`.
template <class Lanes, class Multiply>
inline void philox(const NoiseKey& key, Lanes (&counter)[4], Multiply multiply_low) {
    uint32_t k0 = key.low_seed, k1 = key.high_seed;
    for (int round = 0; round < 10; ++round) {
        const Lanes product0 = multiply_low(counter[0], Lanes{} + MULTIPLIERS[0]);
        const Lanes product1 = multiply_low(counter[2], Lanes{} + MULTIPLIERS[1]);
        counter[0] = (product1 >> 32) ^ counter[1] ^ k0;
        counter[1] = product1;
        counter[2] = (product0 >> 32) ^ counter[3] ^ k1;
        counter[3] = product0;
        k0 += KEY_STEPS[0];
        k1 += KEY_STEPS[1];
    }
}

// -log(u) of one token.
double exact_gap(const NoiseKey& key, int64_t token_id) {
    uint64_t words[4] = {key.turn, key.position, uint64_t(token_id >> 1), COUPLED};
    philox(key, words, [](uint64_t a, uint64_t b) { return (a & 0xFFFFFFFF) * b; });
    const uint64_t high = words[2 * (token_id & 1)] & 0xFFFFFFFF, low = words[2 * (token_id & 1) + 1] & 0xFFFFFFFF;
    return -std::log((double((high << 20) | (low >> 12)) + 0.5) * 0x1p-52);
}

// Lower bound of 2^32 (1 - u), from the words that hold the upper bits of u.
inline Doubles gaps(Words words) {
    const Doubles shifted = (Doubles)((words & 0xFFFFFFFF) | 0x4330000000000000);  // 2^52 + the word
    return (0x1p52 + 0x1p32 - 1.0) - shifted + 0x1p-21;
}

// Returns the winning token: the lowest of equal ones, or -1 if no token has mass.
int64_t coupled_choice(const double* masses, int64_t num_tokens, const NoiseKey& key) {
    Words lanes;
    Places first_half, second_half;  // even and odd ids, each in turn
    for (int lane = 0; lane < WORDS; ++lane) {
        lanes[lane] = lane;
        first_half[lane] = (lane & 1) * WORDS + lane / 2;
        second_half[lane] = (lane & 1) * WORDS + (lane + WORDS) / 2;
    }
    int64_t winner = -1;
    double best = 0.0;   // score of the winner
    double least = 0.0;  // a token can win only if its mass is above this times 2^32 (1 - u)
    const auto look = [&](int64_t token_id, double gap) {
        const double mass = masses[token_id];
        if (!(mass > least * gap)) return;
        const double own_gap = exact_gap(key, token_id), score = std::log(mass) - std::log(own_gap);
        if (winner >= 0 && !(score > best)) return;
        winner = token_id;
        best = score;
        least = mass / own_gap * (1.0 - SLACK) * 0x1p-32;
    };
    for (int64_t token_id = 0; token_id < num_tokens; token_id += 2 * WORDS) {
        double own[2 * WORDS] = {};
        const double* here = masses + token_id;
        const int64_t count = num_tokens - token_id < 2 * WORDS ? num_tokens - token_id : 2 * WORDS;
        if (count < 2 * WORDS) {
            std::memcpy(own, here, count * sizeof(double));
            here = own;
        }
        Doubles mass[2];
        std::memcpy(mass, here, sizeof mass);
        const Places any = (mass[0] > 0.0) | (mass[1] > 0.0);
        if (!has_any(any)) continue;
        Words counter[4] = {Words{} + key.turn, Words{} + key.position, lanes + uint64_t(token_id / 2),
                            Words{} + COUPLED};
        philox(key, counter, multiply);
        const Doubles even = gaps(counter[0]), odd = gaps(counter[2]);
        const Doubles gap[2] = {__builtin_shuffle(even, odd, first_half), __builtin_shuffle(even, odd, second_half)};
        const Places above = (mass[0] > least * gap[0]) | (mass[1] > least * gap[1]);
        if (!has_any(above)) continue;
        for (int64_t index = 0; index < count; ++index) look(token_id + index, gap[index / WORDS][index % WORDS]);
    }
    return winner;
}

}  // namespace
