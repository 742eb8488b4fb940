// The kernels, written once over the primitives of the including file:
//   kLanes, F, U, I     vectors of floats, words and ints, and vector_math.inl over them
//   Pair, madd(), store_pairs(), and Part, kParts, weights_part(), input_part(), add_product() with parts.inl over them
//   MultiplyScope, multiply_rows(), kMaxRows     rows times one panel (multiply.inl is the one for vectors)
//   FASER_BYTES         the file that multiplies 8-bit inputs
//   AttentionScope, score_chunk(), add_chunk(), kTileSize     queries times keys, probabilities times values
//                                                (attention_vectors.inl is the one for vectors)
// Everything is in an unnamed namespace and no standard library code is used: an inline function compiled for one
// instruction set must not be linked into another's callers.

// clang-format off: each file builds on those before it
#include "read_output.inl"
#include "quantized/multiply_quantized.inl"
#include FASER_BYTES
#include "quantized/quantize_row.inl"
#include "quantized/multiply_bytes.inl"
#include "gemm.inl"
#include "append_kv.inl"
#include "verify_attention.inl"
// clang-format on

namespace faser {
namespace {

void embed_row(const uint16_t* row, int size, float* h, int stride) {
  for (int i = 0; i < size; i++) h[i] = float_of(static_cast<uint32_t>(row[i]) << 16);
  for (int i = size; i < stride; i++) h[i] = 0;
}

void embed_output(const Matrix& matrix, int index, int size, float* h, int stride) {
  read_output(matrix, index, size, h);
  for (int i = size; i < stride; i++) h[i] = 0;
}

void norm_row(const float* h, const float* weight, int size, int stride, float eps, void* x) {
  const F scale = F{} + inverse_rms(h, stride, size, eps);
  Pair* out = static_cast<Pair*>(x);
  for (int i = 0; i < stride; i += kLanes) store_pairs(load(h + i) * scale * load(weight + i), out + i / 2);
}

void round_row(const float* h, int size, void* x) {
  Pair* out = static_cast<Pair*>(x);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store_pairs(load(h + i), out + i / 2);
  if (i == size) return;
  Pair tail[kLanes / 2];
  store_pairs(load(h + i), tail);
  __builtin_memcpy(out + i / 2, tail, sizeof(Pair) * static_cast<size_t>(size - i) / 2);
}

const Kernels kTable = {kName,
                        sizeof(Pair),
                        kByteSize,
                        kTileSize,
                        sizeof(AttentionScratch),
                        embed_row,
                        embed_output,
                        norm_row,
                        round_row,
                        quantize_row,
                        gemm,
                        gemm_add,
                        gemm_swiglu,
                        gemm_clamped_swiglu,
                        append_kv,
                        verify_attention};

}  // namespace
}  // namespace faser
