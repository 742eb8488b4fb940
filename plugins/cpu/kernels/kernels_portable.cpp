// Kernels for any architecture that GCC or Clang supports; vectors of four floats map to NEON and SSE.
#include "kernels.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace faser {
namespace {

constexpr char kName[] = "portable";
constexpr int kLanes = 4;
constexpr int kMaxRows = 6;
constexpr int kBlockPairs = 128;  // of a panel, for all rows before the next pairs: 32 KiB, read by columns
constexpr int kTileSize = 4;
constexpr int kColumnVectors = 2;

typedef float F __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

struct Pair {
  float low, high;
};

constexpr int panel_vectors(int num_rows) { return num_rows == 1 ? 8 : num_rows <= 3 ? 4 : 2; }

inline F madd(F a, F b, F c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline F broadcast(const float* x) { return F{*x, *x, *x, *x}; }

// The e2m1 value at `kIndex` of each word. From 1 on, its three bits are those of a float; below are 0 and 0.5.
template <int kIndex>
inline F fp4_of(U words) {
  const U code = words >> (4 * kIndex), bits = code & 7u;
  const I is_small = bits < 2u;
  const U size = ((U)is_small & ((0u - bits) & 0x3f000000u)) | (~(U)is_small & ((bits << 22) + 0x3f000000u));
  return (F)(size | ((code << 28) & 0x80000000u));
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
#define FASER_BYTES "quantized/bytes_as_floats.inl"
#include "kernels.inl"
// clang-format on

namespace faser {
const Kernels* portable_kernels() { return &kTable; }
}  // namespace faser
