// Primitives of AVX-512 with BF16: pairs are bf16 words, as weights are.
#include <immintrin.h>

namespace faser {
namespace {

constexpr int kLanes = 16;

typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));

using Pair = uint32_t;
using Broadcast = __m512i;

inline F madd(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

inline Broadcast broadcast(const Pair* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }

struct Weights {
  Weights() {}
  // Each float is a bf16 value.
  Weights(F low, F high) : bits((__m512i)(((U)low >> 16) | ((U)high & 0xffff0000u))) {}
  explicit Weights(U pairs) : bits((__m512i)pairs) {}
  __m512i bits;
};

// acc + low(w) * low(x) + high(w) * high(x)
inline F dot(F acc, const Weights& w, const Broadcast& x) {
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w.bits, (__m512bh)x);
}

// kLanes neighbouring inputs become kLanes / 2 pairs.
inline void store_pairs(F v, Pair* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

}  // namespace
}  // namespace faser
