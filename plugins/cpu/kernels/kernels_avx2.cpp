#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace faser {
namespace {

constexpr char kName[] = "avx2";
constexpr int kLanes = 8;
constexpr int kMaxRows = 4;
constexpr int kVectorRows = 4;  // of integers
constexpr int kTileSize = 4;
constexpr int kColumnVectors = 2;

typedef float F __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));

// Rounded to bf16 but kept as floats: two broadcasts instead of shifting and masking in the inner loop.
struct Pair {
  float low, high;
};
struct Broadcast {
  F low, high;
};

// Vectors of a panel that R rows multiply at once, so that the accumulators stay in 16 registers.
constexpr int panel_vectors(int num_rows) { return num_rows == 1 ? 8 : num_rows == 2 ? 4 : 2; }

inline F madd(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

inline Broadcast broadcast(const Pair* x) {
  return {(F)_mm256_broadcast_ss(&x->low), (F)_mm256_broadcast_ss(&x->high)};
}

struct Weights {
  Weights() {}
  Weights(F low, F high) : low(low), high(high) {}
  explicit Weights(U pairs) : low((F)(pairs << 16)), high((F)(pairs & 0xffff0000u)) {}
  F low, high;
};

// acc + low(w) * low(x) + high(w) * high(x)
inline F dot(F acc, const Weights& w, const Broadcast& x) { return madd(w.high, x.high, madd(w.low, x.low, acc)); }

}  // namespace
}  // namespace faser

// clang-format off: each builds on those before it
#include "vector_math.inl"
#include "pairs_as_floats.inl"
#include "multiply.inl"
#include "attention_chunk.inl"
#include "attention_vectors.inl"
#include "kernels.inl"
// clang-format on

namespace faser {
const Kernels* avx2_kernels() { return &kTable; }
}  // namespace faser

#else

namespace faser {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace faser

#endif
