#include "kernels.h"

#if defined(__AVX512BF16__)

// clang-format off: each file builds on those before it
#include "avx512bf16.inl"
#include "vector_math.inl"
// clang-format on

namespace faser {
namespace {

constexpr char kName[] = "avx512bf16";
constexpr int kMaxRows = 6;
constexpr int kBlockPairs = 1024;  // 256 KB: this block and the next one stay in the second-level cache
constexpr int kTileSize = 8;
constexpr int kColumnVectors = 2;

// Vectors of a panel that R rows multiply at once: accumulators, weights and one broadcast fill the 32 registers.
constexpr int panel_vectors(int) { return 4; }

}  // namespace
}  // namespace faser

// clang-format off: each file builds on those before it
#include "parts.inl"
#include "multiply.inl"
#include "attention_chunk.inl"
#include "attention_vectors.inl"
#define FASER_BYTES "quantized/bytes_avx512vnni.inl"
#include "kernels.inl"
// clang-format on

namespace faser {
const Kernels* avx512bf16_kernels() { return &kTable; }
}  // namespace faser

#else

namespace faser {
const Kernels* avx512bf16_kernels() { return nullptr; }
}  // namespace faser

#endif
