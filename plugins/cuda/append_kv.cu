// Rotates the queries and keys of new rows and writes keys and values to a paged cache, in one pass over qkv.
//
// append_kv_normed_* take a product of rows that were not normalized: they divide it by the row's root mean square, add
// the bias and norm the heads of q and k, if the model has these. Each block of a row sums the row's squares again,
// from cache, as does each thread for its head. Rows before a branch of their request in the same block
// (executor/branches.py) are written to the branch's block too.
//
// A thread has eight pairs (i, i + head_dim / 2) of one head of one row: the two halves of Hugging Face's rope. Memory
// bound: qkv is read once and as much is written. Speed: not measured.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 16
#include "common.cuh"
#include "ragged.cuh"
#include "rms.cuh"

namespace faser {

constexpr int kVector = 8;
constexpr int kAppendThreads = 128;

// Turns a product of rows [num_rows, hidden_size] into queries, keys and values. bias, q_norm and k_norm may be null.
struct QkvNorm {
  const void* hidden;
  const void* bias;
  const void* q_norm;
  const void* k_norm;
  int hidden_size;
  float eps;
};

struct AppendArguments {
  const void* qkv;
  const float* cos;
  const float* sin;
  const int32_t* positions;
  const int32_t* cu_q_lens;
  const int32_t* block_table;
  const int32_t* kv_lens;
  const int32_t* first_branch;  // null: there are no branches
  int num_rows, batch_size, num_heads, num_kv_heads, head_dim, num_blocks, tokens_per_block, max_blocks_per_seq;
  int max_seq_len;
  float k_scale, v_scale;
  void* q_rotated;
  void* k_cache;
  void* v_cache;
};

// Returns the index of a request's position in a cache, in units of [num_kv_heads, tokens_per_block] tokens of head 0;
// -1 if there is no such request or a number is out of range.
__device__ inline int64_t token_slot(const AppendArguments& args, int request, int position) {
  if (request < 0 || position < 0 || position >= args.max_seq_len || position >= args.kv_lens[request]) return -1;
  const int slot = position / args.tokens_per_block;
  if (slot >= args.max_blocks_per_seq) return -1;
  const int block = args.block_table[static_cast<int64_t>(request) * args.max_blocks_per_seq + slot];
  if (block < 0 || block >= args.num_blocks) return -1;
  return static_cast<int64_t>(block) * args.num_kv_heads * args.tokens_per_block + position % args.tokens_per_block;
}

// Values that are rounded once and may be stored repeatedly: software rounding to e4m3 takes many registers.
template <typename T>
struct Rounded {
  alignas(16) T raw[kVector];

  __device__ explicit Rounded(const float values[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; i++) raw[i] = from_float<T>(values[i]);
  }

  __device__ void store(T* target) const {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(raw);
    } else {
      *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(raw);
    }
  }
};

// Loads the two halves of a chunk of a head of qkv, normalized by `norm`.
template <bool kNormed, typename T, typename Source>
__device__ inline void load_pairs(const AppendArguments& args, const QkvNorm& norm, float scale, int head, int first,
                                  float low[kVector], float high[kVector]) {
  const int half = args.head_dim / 2, all_heads = args.num_heads + 2 * args.num_kv_heads;
  const int column = head * args.head_dim + first;
  const Source* source =
      static_cast<const Source*>(args.qkv) + static_cast<int64_t>(blockIdx.x) * all_heads * args.head_dim + column;
  load_vector(source, low);
  load_vector(source + half, high);
  if constexpr (kNormed) {
    float low_bias[kVector] = {}, high_bias[kVector] = {};
    if (norm.bias != nullptr) {
      load_vector(static_cast<const T*>(norm.bias) + column, low_bias);
      load_vector(static_cast<const T*>(norm.bias) + column + half, high_bias);
    }
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      low[i] = low[i] * scale + low_bias[i];
      high[i] = high[i] * scale + high_bias[i];
    }
  }
}

template <bool kNormed, typename T, typename Kv, typename Source>
__device__ void append(const AppendArguments& args, const QkvNorm& norm) {
  const int row = blockIdx.x, half = args.head_dim / 2, chunks = half / kVector;
  const int all_heads = args.num_heads + 2 * args.num_kv_heads;
  const int unit = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  float scale = 1.0f;
  if constexpr (kNormed) {
    const T* hidden = static_cast<const T*>(norm.hidden) + static_cast<int64_t>(row) * norm.hidden_size;
    scale = inverse_rms<kAppendThreads>(hidden, norm.hidden_size, norm.eps);
  }
  if (unit >= all_heads * chunks) return;
  const int head = unit / chunks, first = unit % chunks * kVector;
  float low[kVector], high[kVector];
  load_pairs<kNormed, T, Source>(args, norm, scale, head, first, low, high);

  const int position = args.positions[row];
  const bool is_query = head < args.num_heads, is_value = head >= args.num_heads + args.num_kv_heads;
  if constexpr (kNormed) {
    const T* weight = static_cast<const T*>(is_query ? norm.q_norm : norm.k_norm);
    if (!is_value && weight != nullptr) {
      float squares = 0.0f;
      for (int start = 0; start < half; start += kVector) {
        float x[kVector], y[kVector];
        load_pairs<kNormed, T, Source>(args, norm, scale, head, start, x, y);
#pragma unroll
        for (int i = 0; i < kVector; i++) squares += x[i] * x[i] + y[i] * y[i];
      }
      const float inverse = inverse_root(squares, args.head_dim, norm.eps);
      float low_weight[kVector], high_weight[kVector];
      load_vector(weight + first, low_weight);
      load_vector(weight + first + half, high_weight);
#pragma unroll
      for (int i = 0; i < kVector; i++) {
        low[i] *= inverse * low_weight[i];
        high[i] *= inverse * high_weight[i];
      }
    }
  }
  if (!is_value) {
    const int64_t angle = static_cast<int64_t>(clamp(position, 0, args.max_seq_len - 1)) * half + first;
    float cos[kVector], sin[kVector];
    load_vector(args.cos + angle, cos);
    load_vector(args.sin + angle, sin);
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float x = low[i], y = high[i];
      low[i] = x * cos[i] - y * sin[i];
      high[i] = y * cos[i] + x * sin[i];
    }
  }
  if (is_query) {
    T* target =
        static_cast<T*>(args.q_rotated) + (static_cast<int64_t>(row) * args.num_heads + head) * args.head_dim + first;
    Rounded<T>(low).store(target);
    Rounded<T>(high).store(target + half);
    return;
  }

  const int request = request_of_row(args.cu_q_lens, args.batch_size, row);
  const int64_t slot = token_slot(args, request, position);
  if (slot < 0) return;
  const int kv_head = head - args.num_heads - (is_value ? args.num_kv_heads : 0);
  if constexpr (sizeof(Kv) == 1) {
    const float inverse = 1.0f / (is_value ? args.v_scale : args.k_scale);
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      low[i] *= inverse;
      high[i] *= inverse;
    }
  }
  const Rounded<Kv> low_kv(low), high_kv(high);
  const auto store = [&](int64_t where) {
    Kv* cache = static_cast<Kv*>(is_value ? args.v_cache : args.k_cache);
    Kv* target = cache + (where + static_cast<int64_t>(kv_head) * args.tokens_per_block) * args.head_dim + first;
    low_kv.store(target);
    high_kv.store(target + half);
  };
  store(slot);
  if constexpr (kNormed) {
    if (args.first_branch == nullptr) return;
    const int end = clamp(args.first_branch[request + 1], 0, args.batch_size);
    for (int branch = clamp(args.first_branch[request], 0, end); branch < end; branch++) {
      const int kv_len = args.kv_lens[branch];
      if (position + 1 >= kv_len || position / args.tokens_per_block != (kv_len - 1) / args.tokens_per_block) continue;
      const int64_t copy = token_slot(args, branch, position);
      if (copy >= 0) store(copy);
    }
  }
}

}  // namespace faser

// AppendArguments from the parameters of a kernel.
#define FASER_APPEND_ARGUMENTS(FIRST_BRANCH)                                                                \
  qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, FIRST_BRANCH, num_rows, batch_size, num_heads, \
      num_kv_heads, head_dim, num_blocks, tokens_per_block, max_blocks_per_seq, max_seq_len,                \
      faser::float_of_bits(k_scale_bits), faser::float_of_bits(v_scale_bits), q_rotated, k_cache, v_cache

// Grid (num_rows, ceil((num_heads + 2 num_kv_heads) * head_dim / 16 / 128)), blocks of 128 threads. Input and output
// caches are the same memory: a plugin's input and output at one address.
#define FASER_APPEND_KV(NAME, T, KV)                                                                           \
  extern "C" __global__ void __launch_bounds__(faser::kAppendThreads) append_kv_##NAME(                        \
      const void* qkv, const float* cos, const float* sin, const int32_t* positions, const int32_t* cu_q_lens, \
      const int32_t* block_table, const int32_t* kv_lens, const void* k_cache_in, const void* v_cache_in,      \
      int32_t num_rows, int32_t batch_size, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,         \
      int32_t num_blocks, int32_t tokens_per_block, int32_t max_blocks_per_seq, int32_t max_seq_len,           \
      int32_t k_scale_bits, int32_t v_scale_bits, void* q_rotated, void* k_cache, void* v_cache) {             \
    static_cast<void>(k_cache_in);                                                                             \
    static_cast<void>(v_cache_in);                                                                             \
    const faser::AppendArguments args = {FASER_APPEND_ARGUMENTS(nullptr)};                                     \
    faser::append<false, T, KV, T>(args, {});                                                                  \
  }
FASER_APPEND_KV(bf16, faser::bf16, faser::bf16)
FASER_APPEND_KV(bf16_e4m3, faser::bf16, faser::e4m3)
FASER_APPEND_KV(fp16, faser::fp16, faser::fp16)
FASER_APPEND_KV(fp16_e4m3, faser::fp16, faser::e4m3)

// The same for a product of rows that were not normalized. hidden [num_rows, hidden_size]: the rows that were
// multiplied, hidden_size a multiple of 8; bias [(num_heads + 2 num_kv_heads) * head_dim], q_norm and k_norm
// [head_dim], of hidden's type, or null. qkv has SOURCE's type. first_branch [batch_size + 1] or null: the branches of
// request i are the requests first_branch[i] to first_branch[i + 1], each at its last position.
#define FASER_APPEND_KV_NORMED(NAME, T, KV, SOURCE)                                                                    \
  extern "C" __global__ void __launch_bounds__(faser::kAppendThreads) append_kv_normed_##NAME(                         \
      const void* qkv, const void* hidden, const void* bias, const void* q_norm, const void* k_norm, const float* cos, \
      const float* sin, const int32_t* positions, const int32_t* cu_q_lens, const int32_t* block_table,                \
      const int32_t* kv_lens, const int32_t* first_branch, int32_t num_rows, int32_t batch_size, int32_t num_heads,    \
      int32_t num_kv_heads, int32_t head_dim, int32_t num_blocks, int32_t tokens_per_block,                            \
      int32_t max_blocks_per_seq, int32_t max_seq_len, int32_t k_scale_bits, int32_t v_scale_bits,                     \
      int32_t hidden_size, int32_t eps_bits, void* q_rotated, void* k_cache, void* v_cache) {                          \
    const faser::AppendArguments args = {FASER_APPEND_ARGUMENTS(first_branch)};                                        \
    const float eps = faser::float_of_bits(eps_bits);                                                                  \
    faser::append<true, T, KV, SOURCE>(args, {hidden, bias, q_norm, k_norm, hidden_size, eps});                        \
  }
FASER_APPEND_KV_NORMED(bf16, faser::bf16, faser::bf16, faser::bf16)
FASER_APPEND_KV_NORMED(bf16_e4m3, faser::bf16, faser::e4m3, faser::bf16)
FASER_APPEND_KV_NORMED(fp16, faser::fp16, faser::fp16, float)
FASER_APPEND_KV_NORMED(fp16_e4m3, faser::fp16, faser::e4m3, float)
