// Early exit: LM head scores of a few candidate tokens from the hidden rows between two segments, and the drafted
// token's rank among them.
//
// One block per row, one warp per candidate: each candidate's LM head row is read once, coalesced; the hidden row and
// the norm stay in cache. Sums use a fixed tree, so a row's scores do not depend on other rows.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 1024
#include <cmath>

#include "block.cuh"

namespace faser {

constexpr int kExitWarps = 8;
constexpr int kExitThreads = kExitWarps * kWarpSize;
constexpr int kMaxCandidates = 32;

// One thread's partial sum: f(first index) over every stride-th pack of entries, starting with pack `first`.
template <typename F>
__device__ float sum_packs(int32_t n, int32_t pack, int32_t first, int32_t stride, F f) {
  float sum = 0.0f;
  for (int32_t i = first * pack; i < n; i += stride * pack) sum += f(i);
  return sum;
}

template <typename T, int kPack>
struct Entries {
  float value[kPack];
  __device__ explicit Entries(const T* x) {
    if constexpr (kPack == 1) {
      value[0] = to_float(*x);
    } else {
      const Pack<T> pack = load_pack(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[i] = to_float(pack.entry[i]);
    }
  }
};

// kPack entries at a time: 16 / sizeof(T) if every row is 16-byte aligned, else 1.
template <typename T, int kPack>
__device__ void score_row(const T* hidden, const T* final_norm, const T* lm_head, const int32_t* candidates,
                          int32_t hidden_size, int32_t vocab_size, int32_t num_candidates, float rms_norm_eps,
                          float* shared_scores) {
  __shared__ float warp_squares[kExitWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  float squares = sum_packs(hidden_size, kPack, threadIdx.x, kExitThreads, [&](int32_t i) {
    const Entries<T, kPack> h(hidden + i);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum += h.value[j] * h.value[j];
    return sum;
  });
  squares = warp_sum(squares);
  if (lane == 0) warp_squares[warp] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int w = 0; w < kExitWarps; ++w) squares += warp_squares[w];
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(hidden_size) + rms_norm_eps);

  for (int32_t c = warp; c < num_candidates; c += kExitWarps) {
    const int32_t token = candidates[c];
    float score = -INFINITY;
    if (token >= 0 && token < vocab_size) {  // the same for the whole warp
      const T* weights = lm_head + static_cast<int64_t>(token) * hidden_size;
      score = warp_sum(sum_packs(hidden_size, kPack, lane, kWarpSize, [&](int32_t i) {
        const Entries<T, kPack> h(hidden + i), norm(final_norm + i), w(weights + i);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPack; ++j) sum += h.value[j] * scale * norm.value[j] * w.value[j];
        return sum;
      }));
    }
    if (lane == 0) shared_scores[c] = score;
  }
  __syncthreads();
}

template <typename T>
__device__ void early_exit_row(const T* hidden, const int32_t* rows, const T* final_norm, const T* lm_head,
                               const int32_t* candidates, const int32_t* drafted_place, int32_t num_rows,
                               int32_t num_hidden_rows, int32_t hidden_size, int32_t vocab_size, int32_t num_candidates,
                               int32_t rms_norm_eps_bits, float* scores, int32_t* rank, float* gap) {
  __shared__ float shared_scores[kMaxCandidates];
  const int32_t i = blockIdx.x;
  if (i >= num_rows || num_candidates < 1 || num_candidates > kMaxCandidates) return;
  const int32_t row = rows[i];
  const float rms_norm_eps = float_of_bits(rms_norm_eps_bits);
  const int32_t* mine = candidates + static_cast<int64_t>(i) * num_candidates;
  if (row < 0 || row >= num_hidden_rows) {
    for (int32_t c = threadIdx.x; c < num_candidates; c += kExitThreads) shared_scores[c] = -INFINITY;
    __syncthreads();
  } else {
    constexpr int kPack = 16 / sizeof(T);
    const T* h = hidden + static_cast<int64_t>(row) * hidden_size;
    if (hidden_size % kPack == 0 && is_aligned(hidden) && is_aligned(final_norm) && is_aligned(lm_head)) {
      score_row<T, kPack>(h, final_norm, lm_head, mine, hidden_size, vocab_size, num_candidates, rms_norm_eps,
                          shared_scores);
    } else {
      score_row<T, 1>(h, final_norm, lm_head, mine, hidden_size, vocab_size, num_candidates, rms_norm_eps,
                      shared_scores);
    }
  }
  for (int32_t c = threadIdx.x; c < num_candidates; c += kExitThreads) {
    scores[static_cast<int64_t>(i) * num_candidates + c] = shared_scores[c];
  }
  if (threadIdx.x != 0) return;
  const int32_t place = drafted_place[i];
  const float drafted = place >= 0 && place < num_candidates ? shared_scores[place] : -INFINITY;
  float best = -INFINITY;
  int32_t num_better = 0;
  for (int32_t c = 0; c < num_candidates; ++c) {
    best = fmaxf(best, shared_scores[c]);
    num_better += shared_scores[c] > drafted ? 1 : 0;
  }
  rank[i] = num_better;
  gap[i] = best > drafted ? best - drafted : 0.0f;
}

}  // namespace faser

// hidden [num_hidden_rows, hidden_size]; rows [num_rows]; final_norm [hidden_size]; lm_head [vocab_size, hidden_size];
// candidates [num_rows, num_candidates] (1 to 32), drafted_place [num_rows] -> scores, rank, gap.
#define FASER_EARLY_EXIT(NAME, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(faser::kExitThreads)                                                \
      NAME(const T* hidden, const int32_t* rows, const T* final_norm, const T* lm_head, const int32_t* candidates, \
           const int32_t* drafted_place, int32_t num_rows, int32_t num_hidden_rows, int32_t hidden_size,           \
           int32_t vocab_size, int32_t num_candidates, int32_t rms_norm_eps_bits, float* scores, int32_t* rank,    \
           float* gap) {                                                                                           \
    faser::early_exit_row(hidden, rows, final_norm, lm_head, candidates, drafted_place, num_rows, num_hidden_rows, \
                          hidden_size, vocab_size, num_candidates, rms_norm_eps_bits, scores, rank, gap);          \
  }
FASER_EARLY_EXIT(early_exit_bf16, faser::bf16)
FASER_EARLY_EXIT(early_exit_fp16, faser::fp16)
