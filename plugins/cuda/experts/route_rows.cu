// Chooses the experts of each row of a mixture, and sorts the pairs of row and expert by expert, for grouped products.
//
// Three launches: the router's logits, with a warp per expert and eight rows; each row's experts, with a warp per row;
// the places of the pairs, with a block per expert. A different expert changes more than the last bit, so a row's
// logits must not depend on other rows: they are summed in a fixed order here, not by a library's product. The host
// reads nothing: the number of rows, the groups and the count of experts stay on the device. Speed: not measured.
//
// limits: registers <= 112, spill_bytes <= 0, shared_bytes <= 128
#define FASER_BLOCK_THREADS 256
#include "block.cuh"
#include "common.cuh"
#include "rms.cuh"

namespace faser {

constexpr int kRowTile = 8;  // rows that share a read of the router
constexpr int kMaxExperts = 512;
constexpr int kExpertsPerLane = kMaxExperts / kWarpSize;

// The number of rows before the dummies, which only the device knows.
__device__ inline int32_t num_used_rows(const int32_t* num_used, int32_t num_rows) {
  return clamp(*num_used, 0, num_rows);
}

__device__ inline void router_logits(const bf16* x, const bf16* router, const bf16* bias, int32_t num_used,
                                     int32_t num_outputs, int32_t width, float* logits) {
  const int32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int32_t output = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  const int32_t first = static_cast<int32_t>(blockIdx.y) * kRowTile;
  if (output >= num_outputs || first >= num_used) return;
  float sums[kRowTile] = {};
  for (int32_t i = lane * 8; i < width; i += kWarpSize * 8) {
    float weights[8], values[8];
    load_vector(router + static_cast<int64_t>(output) * width + i, weights);
#pragma unroll
    for (int r = 0; r < kRowTile; r++) {
      if (first + r >= num_used) break;
      load_vector(x + static_cast<int64_t>(first + r) * width + i, values);
#pragma unroll
      for (int j = 0; j < 8; j++) sums[r] += values[j] * weights[j];
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTile; r++) {
    const float sum = warp_sum(sums[r]) + (bias == nullptr ? 0.0f : to_float(bias[output]));
    if (lane == 0 && first + r < num_used) logits[static_cast<int64_t>(first + r) * num_outputs + output] = sum;
  }
}

// A larger key comes first: that of the larger logit or, for equal logits, the lower index. No logit is -0, since sums
// begin with 0.
__device__ inline uint64_t key_of(float logit, int32_t expert) {
  const uint32_t bits = static_cast<uint32_t>(__float_as_int(logit));
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

// over_all: the weights come from a softmax over all experts, otherwise over the chosen ones.
__device__ inline void choose(const float* logits, int32_t num_used, int32_t num_experts, int32_t num_outputs,
                              int32_t top_k, bool over_all, int32_t* counts, int32_t* experts, float* weights) {
  const int32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (row >= num_used) return;
  float own[kExpertsPerLane];  // of the experts lane, lane + 32 ...
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    const int32_t expert = lane + i * kWarpSize;
    own[i] = expert < num_experts ? logits[row * num_outputs + expert] : 0.0f;
  }
  uint32_t taken = 0;
  int32_t first = 0;
  for (int32_t j = 0; j < top_k; j++) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) {
      const int32_t expert = lane + i * kWarpSize;
      if (expert < num_experts && !(taken >> i & 1)) best = Max()(best, key_of(own[i], expert));
    }
    best = warp_reduce(best, Max());
    const int32_t expert = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best));
    if (expert % kWarpSize == lane) taken |= 1u << expert / kWarpSize;
    if (j == 0) first = expert;
  }
  const float largest = logits[row * num_outputs + clamp(first, 0, num_experts - 1)];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    own[i] = expf(own[i] - largest);
    const bool counts_in = over_all ? lane + i * kWarpSize < num_experts : taken >> i & 1;
    if (counts_in) sum += own[i];
  }
  sum = warp_sum(sum);
  int32_t num_before = 0;
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    const bool is_taken = taken >> i & 1;
    const uint32_t votes = __ballot_sync(kFullMask, is_taken);
    const int32_t place = num_before + __popc(votes & ((1u << lane) - 1));
    if (is_taken && place < top_k) {
      experts[row * top_k + place] = lane + i * kWarpSize;
      weights[row * top_k + place] = own[i] / sum;
      atomicAdd(counts + lane + i * kWarpSize, 1);
    }
    num_before += __popc(votes);
  }
}

__device__ inline void sort_pairs(const int32_t* counts, const int32_t* experts, int32_t num_used, int32_t num_pairs,
                                  int32_t num_experts, int32_t top_k, int32_t* rows, int32_t* places, int32_t* ends,
                                  int32_t* num_distinct) {
  const int32_t expert = blockIdx.x, thread = threadIdx.x;
  uint64_t before = 0;
  for (int32_t e = thread; e < expert; e += kThreads) before += static_cast<uint64_t>(counts[e]);
  int32_t next = static_cast<int32_t>(block_reduce(before, Sum()));
  const int32_t count = counts[expert], end = next + count;
  if (thread == 0) {
    ends[expert] = end;
    if (count > 0) atomicAdd(num_distinct, 1);
  }
  for (int32_t base = 0; base < num_used && count > 0; base += kThreads) {
    const int32_t row = base + thread;
    int32_t slot = -1;
    for (int32_t j = 0; j < top_k && row < num_used; j++) {
      if (experts[static_cast<int64_t>(row) * top_k + j] == expert) slot = j;
    }
    uint64_t total = 0;
    const int32_t pair = next + static_cast<int32_t>(block_exclusive_sum(slot >= 0, &total));
    if (slot >= 0 && pair < num_pairs) {
      rows[pair] = row;
      places[static_cast<int64_t>(row) * top_k + slot] = pair;
    }
    next += static_cast<int32_t>(total);
  }
  if (expert != num_experts - 1) return;
  for (int32_t pair = end + thread; pair < num_pairs; pair += kThreads) rows[pair] = 0;  // pairs of dummies
}

}  // namespace faser

// Grid (ceil(num_outputs / 8), ceil(num_rows / 8)), blocks of 256 threads. Inputs: x [num_rows, width], router
// [num_outputs, width], bias [num_outputs] or null, num_used [1]: rows before the dummies. Writes logits [num_rows,
// num_outputs], and sets counts [num_experts] and, if is_first, num_distinct [1] to 0. width is a multiple of 8,
// addresses of x and router of 16.
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    route_rows_logits(const faser::bf16* x, const faser::bf16* router, const faser::bf16* bias, const int32_t* num_used,
                      int32_t num_rows, int32_t num_experts, int32_t num_outputs, int32_t width, int32_t is_first,
                      float* logits, int32_t* counts, int32_t* num_distinct) {
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int32_t e = threadIdx.x; e < num_experts; e += faser::kThreads) counts[e] = 0;
    if (threadIdx.x == 0 && is_first) *num_distinct = 0;
  }
  faser::router_logits(x, router, bias, faser::num_used_rows(num_used, num_rows), num_outputs, width, logits);
}

// Grid (ceil(num_rows / 8)), blocks of 256 threads; num_experts is at most 512 and at most num_outputs. Input: logits
// [num_rows, num_outputs]. Writes experts, weights [num_rows, top_k], in ascending order of the expert, and adds to
// counts [num_experts].
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    route_rows_choose(const float* logits, const int32_t* num_used, int32_t num_rows, int32_t num_experts,
                      int32_t num_outputs, int32_t top_k, int32_t over_all, int32_t* counts, int32_t* experts,
                      float* weights) {
  if (num_experts > faser::kMaxExperts || top_k > num_experts || num_outputs < num_experts) return;
  faser::choose(logits, faser::num_used_rows(num_used, num_rows), num_experts, num_outputs, top_k, over_all != 0,
                counts, experts, weights);
}

// Grid (num_experts), blocks of 256 threads. Inputs: counts, experts of the launch before. Writes rows [num_rows *
// top_k]: the row of each pair, by expert and then by row, 0 after the last pair; places [num_rows, top_k]: indices of
// a row's pairs there; ends [num_experts]: the number of pairs up to and including an expert. Adds the number of
// experts with pairs to num_distinct [1].
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    route_rows_sort(const int32_t* counts, const int32_t* experts, const int32_t* num_used, int32_t num_rows,
                    int32_t num_experts, int32_t top_k, int32_t* rows, int32_t* places, int32_t* ends,
                    int32_t* num_distinct) {
  if (static_cast<int32_t>(blockIdx.x) >= num_experts) return;
  faser::sort_pairs(counts, experts, faser::num_used_rows(num_used, num_rows), num_rows * top_k, num_experts, top_k,
                    rows, places, ends, num_distinct);
}
