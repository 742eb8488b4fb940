#include "gumbel_max.h"

#include <cstring>

#include "faser_cpu.h"
#include "philox.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace faser {
namespace {

constexpr int32_t kCounters = kGumbelTokens / 4;

using GumbelWords = void (*)(uint64_t key, uint64_t position, uint32_t first_counter, uint32_t* words);

void gumbel_words_portable(uint64_t key, uint64_t position, uint32_t first_counter, uint32_t* words) {
  for (int32_t i = 0; i < kCounters; ++i) {
    const uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                                 first_counter + static_cast<uint32_t>(i), kGumbelStream};
    uint32_t out[4];
    philox4x32(counter, key, out);
    for (int32_t j = 0; j < 4; ++j) words[j * kCounters + i] = out[j];
  }
}

#if defined(__x86_64__)
// Each 64-bit lane has one counter's word in its low half. The multiplication ignores the high half, which may have
// any value.
__attribute__((target("avx2"))) void gumbel_words_avx2(uint64_t key, uint64_t position, uint32_t first_counter,
                                                       uint32_t* words) {
  constexpr int kLanes = 4, kGroups = kCounters / kLanes;
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMultiplier0), m1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  __m256i c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    c0[g] = _mm256_set1_epi64x(static_cast<int64_t>(position));
    c1[g] = _mm256_set1_epi64x(static_cast<int64_t>(position >> 32));
    c2[g] = _mm256_add_epi64(_mm256_set1_epi64x(first_counter + static_cast<uint32_t>(g * kLanes)),
                             _mm256_setr_epi64x(0, 1, 2, 3));
    c3[g] = _mm256_set1_epi64x(kGumbelStream);
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i round_key0 = _mm256_set1_epi64x(k0), round_key1 = _mm256_set1_epi64x(k1);
    for (int g = 0; g < kGroups; ++g) {
      const __m256i a = _mm256_mul_epu32(c0[g], m0), b = _mm256_mul_epu32(c2[g], m1);
      c0[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1[g]), round_key0);
      c2[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3[g]), round_key1);
      c1[g] = b;
      c3[g] = a;
    }
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  const __m256i low_halves = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  for (int g = 0; g < kGroups; ++g) {
    const __m256i lanes[4] = {c0[g], c1[g], c2[g], c3[g]};
    for (int j = 0; j < 4; ++j) {
      const __m256i packed = _mm256_permutevar8x32_epi32(lanes[j], low_halves);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(words + j * kCounters + g * kLanes), _mm256_castsi256_si128(packed));
    }
  }
}
#endif

GumbelWords choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (std::strcmp(faser_isa(), "portable") != 0 && __builtin_cpu_supports("avx2")) return gumbel_words_avx2;
#endif
  return gumbel_words_portable;
}

}  // namespace

void gumbel_words(uint64_t key, uint64_t position, int32_t first_token, uint32_t words[kGumbelTokens]) {
  static const GumbelWords chosen = choose();
  chosen(key, position, static_cast<uint32_t>(first_token) / 4, words);
}

double gumbel_uniform(uint64_t key, uint64_t position, int32_t token, uint32_t word) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                               static_cast<uint32_t>(token), kGumbelLowStream};
  uint32_t low[4];
  philox4x32(counter, key, low);
  const uint64_t bits = (static_cast<uint64_t>(word) << 20) | (low[0] >> 12);
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

}  // namespace faser
