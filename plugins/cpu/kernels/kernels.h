// The kernels of a forward pass for one instruction set, each for one row, one range of panels or one tile.
//
// Activations that are multiplied with weights, keys or values are rounded to bf16 and kept as pairs of neighboring
// inputs. How a pair is stored depends on the instruction set (pair_bytes each); other code only moves pointers. A
// row's result does not depend on other rows.
#ifndef FASER_KERNELS_H_
#define FASER_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace faser {

constexpr int kPanel = 64;         // outputs per packed weight panel (FASER_PANEL)
constexpr int kPageTokens = 16;    // tokens of a KV page; a block is one or more pages
constexpr int kChunkTokens = 256;  // positions between rescalings of attention's running sum
constexpr int kMaxHeadDim = 256;
constexpr int kRowAlignment = 16;  // activation matrices are allocated in multiples of 16 rows, since tiles read whole
                                   // groups
constexpr int kMaxTile = 16;       // maximum query vectors processed together by attention

// A packed matrix: panels of 64 outputs, words [inputs per word][64], see faser_cpu.h.
struct Matrix {
  const uint32_t* words;
  const float* scales;  // null for bf16; of a panel [groups][64]
  int bits;             // 16: bf16; 8 or 4: integers
  int group_size;       // inputs that share a scale; 0: all
  int num_pairs;        // in_padded / 2
  int input_bits = 16;  // 16: inputs are pairs; 8, for integers only: inputs are from quantize_row
  bool is_fp4 = false;  // the four bits are e2m1 instead of integers
};

// Type of a quantized weight: an integer, or e2m1.
enum Code { kInt8, kInt4, kFp4 };
constexpr int bits_of(Code code) { return code == kInt8 ? 8 : 4; }

// Words before the inputs of a row of 8-bit inputs: scales and starts of sums, at most one of each per 32 inputs.
constexpr int byte_row_header(int num_inputs) { return (num_inputs / 16 + 15) / 16 * 16; }

// y = x W^T over panels [first_panel, last_panel) of a packed matrix.
struct Gemm {
  Matrix weights;
  const float* bias;  // padded to whole panels, or null
  const void* x;      // [num_rows] rows of pairs, or of 8-bit inputs
  int x_stride;       // pairs, or words
  int num_rows;
};

struct HeadShape {
  int num_heads, num_kv_heads, head_dim;
  int padded_dim;  // head_dim rounded up to 32
  float rms_norm_eps;
  bool norms_all_heads;  // see faser_model
};

// KV memory of one layer: block b, KV head h starts at base + b * block_stride + h * head_stride (in words). First the
// pages of keys, each [padded_dim / 2][16 tokens] bf16 pairs along head_dim, then at value_offset the values,
// [tokens / 2][padded_dim] bf16 pairs of neighboring tokens.
struct KvLayer {
  uint32_t* base;
  size_t block_stride, head_stride, value_offset;
  int tokens_per_block;
};

// One tile of queries of one request and KV head.
struct AttentionTile {
  const int32_t* blocks;  // the request's row of the block table
  int kv_head;
  int num_queries;                     // at most kMaxTile
  const void* queries[kMaxTile];       // pairs [padded_dim / 2]
  void* outputs[kMaxTile];             // pairs [head_dim / 2]
  int begin[kMaxTile], end[kMaxTile];  // visible positions
  bool has_sinks;
  float sinks[kMaxTile];  // an additional logit for each, which takes a share of the softmax
};

struct Kernels {
  const char* name;
  size_t pair_bytes;
  size_t byte_size;      // maximum bytes of an 8-bit input
  int tile_size;         // query vectors per AttentionTile that suit the registers
  size_t scratch_bytes;  // per thread

  // h [stride] = bf16 row [size], zero beyond; or output `index` of a packed matrix.
  void (*embed_row)(const uint16_t* row, int size, float* h, int stride);
  void (*embed_output)(const Matrix& matrix, int index, int size, float* h, int stride);
  // x = pairs of RMSNorm(h) * weight over `size` values; h and weight are zero from size to stride.
  void (*norm_row)(const float* h, const float* weight, int size, int stride, float eps, void* x);
  // x = pairs of h [size], which can be read up to the next multiple of 16.
  void (*round_row)(const float* h, int size, void* x);
  // out = 8-bit inputs for these weights: byte_row_header(n) words, then n inputs, of n = 2 * num_pairs.
  void (*quantize_row)(const Matrix& weights, const void* x, uint32_t* out);
  void (*gemm)(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride);
  void (*gemm_add)(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride);
  // out = silu(gate) * up as pairs: gate is panel p, up panel p + up_panel.
  void (*gemm_swiglu)(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride);
  // The same for (up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up within -7 and 7.
  void (*gemm_clamped_swiglu)(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride);
  // Applies q/k norm (if not null) and rope to one qkv row. Queries become pairs [num_heads][padded_dim / 2]; key and
  // value are appended at block and offset. cos, sin: [head_dim / 2].
  void (*append_kv)(const HeadShape& shape, const float* qkv, const float* q_norm, const float* k_norm,
                    const float* cos, const float* sin, void* queries, const KvLayer& kv, int block, int offset);
  void (*verify_attention)(const HeadShape& shape, const KvLayer& kv, const AttentionTile& tile, void* scratch);
};

// null if the build or the architecture does not support it.
const Kernels* amxbf16_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* avx2_kernels();
const Kernels* portable_kernels();

// The kernels of this process.
const Kernels& kernels();

}  // namespace faser

#endif  // FASER_KERNELS_H_
