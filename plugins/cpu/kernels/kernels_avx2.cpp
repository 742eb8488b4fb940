#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace faser {
namespace {

constexpr char kName[] = "avx2";
constexpr int kLanes = 8;
constexpr int kMaxRows = 5;
constexpr int kBlockPairs = 128;  // of a panel, for all rows before the next pairs: 32 KiB, read by columns
constexpr int kTileSize = 4;
constexpr int kColumnVectors = 2;

typedef float F __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));

// Rounded to bf16 but kept as floats: one broadcast each in place of shifting and masking in the inner loop.
struct Pair {
  float low, high;
};

// Vectors of a panel that R rows multiply at once, so that the accumulators and the parts in use stay in 16
// registers.
constexpr int panel_vectors(int num_rows) { return num_rows == 1 ? 8 : num_rows <= 2 ? 4 : 2; }

inline F madd(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

inline F broadcast(const float* x) { return (F)_mm256_broadcast_ss(x); }

// The e2m1 value at `kIndex` of each word: its size looked up by three bits, and its sign.
template <int kIndex>
inline F fp4_of(U words) {
  const __m256 sizes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const U size = (U)_mm256_permutevar8x32_ps(sizes, (__m256i)(words >> (4 * kIndex)));
  return (F)(size | ((words << (28 - 4 * kIndex)) & 0x80000000u));
}

}  // namespace
}  // namespace faser

// clang-format off: each file builds on those before it
#include "vector_math.inl"
#include "pairs_as_floats.inl"
#include "parts.inl"
#include "multiply.inl"
#include "attention_chunk.inl"
#include "attention_vectors.inl"
#define FASER_BYTES "quantized/bytes_avx2.inl"
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
