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
