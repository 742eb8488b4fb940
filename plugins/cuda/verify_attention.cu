// Attention of ragged rows over a paged KV cache.
//
// The rows of a request times the query heads of one KV head are packed into tiles of 16 or 64: n rows with groups of G
// heads fill n * G of them, so K and V are read from memory once per request and KV head if n * G fits the tile. That
// is the roofline: kv_len * 2 * head_dim * sizeof(KV) bytes per request and KV head over the memory's bandwidth. Long
// chunks of context are bound by the tensor cores instead. README.md of this folder has times.
//
// Blocks find their work on the device (attention/work.cuh), so the host only needs bounds. A block processes every
// gridDim.x-th item. The positions of long contexts are cut into chunks, whose partial results are merged by the last
// block of a tile, or by verify_attention_combine where more blocks should share that.
//
// A window of -1 hides the first position from all rows but its own: an EAGLE-3 head runs it without a hidden row. With
// a window of -2 - w, rows see all rows of their request, as in a block drafter's block, and w positions up to their
// own (0: all). Kernels named `sinks` add a score per head to the softmax, and drop its share.
//
// FASER_HEAD_DIM=H compiles a single head size.
//
// 64 rows of 256 values are more than the registers hold: where spills are allowed below, a few addresses are read back
// once per tile or item.
// limits of *_h256_m64: registers <= 255, spill_bytes <= 640, shared_bytes <= 49152
// limits of *_h256_m16: registers <= 255, spill_bytes <= 588, shared_bytes <= 49152
// limits of *_h64_m64: registers <= 168, spill_bytes <= 256, shared_bytes <= 49152
// limits of *_h80_m64: registers <= 168, spill_bytes <= 280, shared_bytes <= 49152
// limits of *_h96_m64: registers <= 255, spill_bytes <= 0, shared_bytes <= 49152
// limits of *_h128_m64: registers <= 255, spill_bytes <= 96, shared_bytes <= 49152
// limits of *_h128_m16: registers <= 168, spill_bytes <= 68, shared_bytes <= 49152
// limits of verify_attention_combine_*: registers <= 96, spill_bytes <= 0, shared_bytes <= 0
// limits: registers <= 168, spill_bytes <= 0, shared_bytes <= 49152
#include "attention/attend.cuh"
#include "attention/combine.cuh"
#include "attention/tiling.cuh"
#include "attention/work.cuh"
#include "common.cuh"

#ifndef FASER_HEAD_DIM
#define FASER_HEAD_DIM 0
#endif

#define FASER_ATTENTION_PARAMETERS                                                                                    \
  const void *q, const void *k_cache, const void *v_cache, const int32_t *block_table, const int32_t *cu_q_lens,      \
      const int32_t *kv_lens, int32_t num_rows, int32_t batch_size, int32_t num_heads, int32_t num_kv_heads,          \
      int32_t num_blocks, int32_t tokens_per_block, int32_t max_blocks_per_seq, int32_t window, int32_t split_tokens, \
      int32_t max_slots, int32_t in_place, int32_t scale_bits, int32_t v_scale_bits, void *out, float *workspace

// AttentionArguments, but for `sinks`.
#define FASER_ATTENTION_ARGUMENTS                                                                                  \
  q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, num_rows, batch_size, num_heads, num_kv_heads, num_blocks, \
      tokens_per_block, max_blocks_per_seq, window, split_tokens, max_slots, in_place,                             \
      faser::float_of_bits(scale_bits), faser::float_of_bits(v_scale_bits), out, workspace

// Grid (blocks, num_kv_heads). Without slots there are more blocks than tiles: (num_rows * group + min(num_rows,
// batch_size) * (tile_rows - 1)) / tile_rows + 1 at least; with slots any number does.
// scale_bits: the softmax scale times that of an e4m3 K. SINKS: an expression; the parameters follow it.
#define FASER_VERIFY_ATTENTION(NAME, T, KV, HEAD_DIM, TILE_ROWS, SINKS, ...)                              \
  extern "C" __global__ void __launch_bounds__(faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kNumThreads,       \
                                               faser::Tiling<KV, HEAD_DIM, TILE_ROWS>::kMinBlocks)        \
      verify_attention_##NAME##_h##HEAD_DIM##_m##TILE_ROWS(__VA_ARGS__) {                                 \
    faser::attend_all<T, KV, faser::Tiling<KV, HEAD_DIM, TILE_ROWS>>({FASER_ATTENTION_ARGUMENTS, SINKS}); \
  }

#define FASER_VERIFY_ATTENTION_OF_TYPES(NAME, T, KV, HEAD_DIM, SINKS, ...) \
  FASER_VERIFY_ATTENTION(NAME, T, KV, HEAD_DIM, 16, SINKS, __VA_ARGS__)    \
  FASER_VERIFY_ATTENTION(NAME, T, KV, HEAD_DIM, 64, SINKS, __VA_ARGS__)

#define FASER_VERIFY_ATTENTION_OF_HEAD(HEAD_DIM)                                                                      \
  FASER_VERIFY_ATTENTION_OF_TYPES(bf16, faser::bf16, faser::bf16, HEAD_DIM, nullptr, FASER_ATTENTION_PARAMETERS)      \
  FASER_VERIFY_ATTENTION_OF_TYPES(bf16_e4m3, faser::bf16, faser::e4m3, HEAD_DIM, nullptr, FASER_ATTENTION_PARAMETERS) \
  FASER_VERIFY_ATTENTION_OF_TYPES(fp16, faser::fp16, faser::fp16, HEAD_DIM, nullptr, FASER_ATTENTION_PARAMETERS)      \
  FASER_VERIFY_ATTENTION_OF_TYPES(fp16_e4m3, faser::fp16, faser::e4m3, HEAD_DIM, nullptr, FASER_ATTENTION_PARAMETERS)

#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 64
FASER_VERIFY_ATTENTION_OF_HEAD(64)
FASER_VERIFY_ATTENTION_OF_TYPES(sinks_bf16, faser::bf16, faser::bf16, 64, sinks, FASER_ATTENTION_PARAMETERS,
                                const float* sinks)
FASER_VERIFY_ATTENTION_OF_TYPES(sinks_bf16_e4m3, faser::bf16, faser::e4m3, 64, sinks, FASER_ATTENTION_PARAMETERS,
                                const float* sinks)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 80
FASER_VERIFY_ATTENTION_OF_HEAD(80)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 96
FASER_VERIFY_ATTENTION_OF_HEAD(96)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 128
FASER_VERIFY_ATTENTION_OF_HEAD(128)
#endif
#if FASER_HEAD_DIM == 0 || FASER_HEAD_DIM == 256
FASER_VERIFY_ATTENTION_OF_HEAD(256)
#endif

#define FASER_COMBINE_PARAMETERS(T)                                                                              \
  const T *whole, const float *workspace, const int32_t *cu_q_lens, const int32_t *kv_lens, int32_t num_rows,    \
      int32_t batch_size, int32_t num_heads, int32_t num_kv_heads, int32_t tokens_per_block,                     \
      int32_t max_blocks_per_seq, int32_t window, int32_t split_tokens, int32_t max_slots, int32_t v_scale_bits, \
      int32_t head_dim, T *out

#define FASER_COMBINE_ARGUMENTS                                                                             \
  nullptr, nullptr, nullptr, nullptr, cu_q_lens, kv_lens, num_rows, batch_size, num_heads, num_kv_heads, 0, \
      tokens_per_block, max_blocks_per_seq, window, split_tokens, max_slots, 0, 0.0f,                       \
      faser::float_of_bits(v_scale_bits), nullptr, const_cast<float*>(workspace)

// Grid (num_rows, ceil(num_heads / 4)), blocks of 128 threads; sizes as in the launch before. 8 blocks per SM allow 64
// registers: by default ptxas uses 32 on sm_80 to sm_89, and spills.
#define FASER_VERIFY_ATTENTION_COMBINE(NAME, T, SINKS, ...)                                           \
  extern "C" __global__ void __launch_bounds__(128, 8) verify_attention_combine_##NAME(__VA_ARGS__) { \
    faser::combine<T>({FASER_COMBINE_ARGUMENTS, SINKS}, whole, head_dim, out);                        \
  }
FASER_VERIFY_ATTENTION_COMBINE(bf16, faser::bf16, nullptr, FASER_COMBINE_PARAMETERS(faser::bf16))
FASER_VERIFY_ATTENTION_COMBINE(fp16, faser::fp16, nullptr, FASER_COMBINE_PARAMETERS(faser::fp16))
FASER_VERIFY_ATTENTION_COMBINE(sinks_bf16, faser::bf16, sinks, FASER_COMBINE_PARAMETERS(faser::bf16),
                               const float* sinks)
