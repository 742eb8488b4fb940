// Primitives of AVX-512 with BF16: pairs are bf16 words, as weights are.
#include <immintrin.h>

namespace faser {
namespace {

constexpr int kLanes = 16;

typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));

using Pair = uint32_t;

inline F madd(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// One instruction multiplies a pair of weights and one of inputs.
constexpr int kParts = 1;
using Part = __m512i;

template <int>
inline Part weights_part(U pairs) {
  return (__m512i)pairs;
}

// Each float is a bf16 value.
template <int>
inline Part weights_part(F low, F high) {
  return (__m512i)(((U)low >> 16) | ((U)high & 0xffff0000u));
}

// Integers of four bits are looked up in three instructions a pair, where converting them takes eight.
constexpr bool kLooksUpNibbles = true;

// The pair of integers in byte kPair of each word, times 2^28. Only the lowest five bits of an index count, and the
// table has everything twice, so that what is left of a neighbour does not matter.
template <int kPair>
inline Part look_up_nibbles(U words) {
  alignas(64) static constexpr uint16_t kTable[32] = {0,      0x4d80, 0x4e00, 0x4e40, 0x4e80, 0x4ea0, 0x4ec0, 0x4ee0,
                                                      0xcf00, 0xcee0, 0xcec0, 0xcea0, 0xce80, 0xce40, 0xce00, 0xcd80,
                                                      0,      0x4d80, 0x4e00, 0x4e40, 0x4e80, 0x4ea0, 0x4ec0, 0x4ee0,
                                                      0xcf00, 0xcee0, 0xcec0, 0xcea0, 0xce80, 0xce40, 0xce00, 0xcd80};
  constexpr uint32_t kTwice = 0x80008000u | kPair * 0x00010001u;  // the byte into both halves
  const __m512i bytes = _mm512_shuffle_epi8(
      (__m512i)words, _mm512_broadcast_i32x4(_mm_setr_epi32(
                          static_cast<int>(kTwice), static_cast<int>(kTwice + 0x00040004u),
                          static_cast<int>(kTwice + 0x00080008u), static_cast<int>(kTwice + 0x000c000cu))));
  const __m512i indices = _mm512_srlv_epi16(bytes, _mm512_set1_epi32(0x00040000));
  return _mm512_permutexvar_epi16(indices, _mm512_load_si512(kTable));
}

template <int>
inline Part input_part(const Pair* x) {
  return _mm512_set1_epi32(static_cast<int>(*x));
}

// acc + low(weights) * low(input) + high(weights) * high(input)
inline F add_product(F acc, Part weights, Part input) {
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)input);
}

// kLanes neighbouring inputs become kLanes / 2 pairs.
inline void store_pairs(F v, Pair* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

}  // namespace
}  // namespace faser
