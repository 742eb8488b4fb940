// Early pruning's decision: from the scores of the draft's candidates at a segment boundary, how many of its first rows
// each request keeps, and the list of the hidden rows that stay, for compact_rows.
//
// One block, so registers do not limit occupancy: a batch has a few rows per request. A thread decides for a request;
// then all list the rows in order.
//
// limits: registers <= 64, spill_bytes <= 0, shared_bytes <= 256
#include <cmath>

#include "block.cuh"

namespace faser {

constexpr int kMaxPlace = 8;  // larger ranks count as this

__device__ inline double sigmoid(double z) {
  if (z >= 0.0) return 1.0 / (1.0 + exp(-z));
  const double e = exp(z);
  return e / (1.0 + e);
}

// Returns how many of the first drafts are worth the row after them: up to each, the product of the estimates is at
// least rule[4]. scores [num_drafts, num_candidates], places and before [num_drafts].
__device__ inline int32_t num_worth(const float* scores, const int32_t* places, const float* before, int32_t num_drafts,
                                    int32_t num_candidates, const float* rule) {
  double alive = 1.0;
  for (int32_t j = 0; j < num_drafts; ++j, scores += num_candidates) {
    const int32_t place = places[j];
    const float drafted = place >= 0 && place < num_candidates ? scores[place] : -INFINITY;
    float best = -INFINITY;
    int32_t rank = 0;
    for (int32_t c = 0; c < num_candidates; ++c) {
      rank += scores[c] > drafted;
      best = scores[c] > best ? scores[c] : best;
    }
    const double gap = rank > 0 ? static_cast<double>(best - drafted) : 0.0;
    double logit = static_cast<double>(rule[0]) * (rank < kMaxPlace ? rank : kMaxPlace);
    logit += static_cast<double>(rule[1]) * gap;
    logit += static_cast<double>(rule[3]) + static_cast<double>(rule[2]) * static_cast<double>(before[j]);
    alive *= sigmoid(logit);
    if (alive < static_cast<double>(rule[4])) return j;
  }
  return num_drafts;
}

__device__ inline void prune(const float* scores, const int32_t* places, const float* before, const int32_t* cu_drafts,
                             const int32_t* starts, const float* rule, int32_t num_requests, int32_t num_drafts,
                             int32_t num_candidates, int32_t num_hidden, int32_t num_listed, int32_t* kept,
                             int32_t* rows) {
  for (int32_t r = threadIdx.x; r < num_listed; r += kThreads) rows[r] = r < num_hidden;
  __syncthreads();
  for (int32_t b = threadIdx.x; b < num_requests; b += kThreads) {
    const int32_t first = cu_drafts[b], end = cu_drafts[b + 1];
    int32_t stays = 1;
    if (first >= 0 && end <= num_drafts && first <= end) {
      const int64_t offset = static_cast<int64_t>(first) * num_candidates;
      stays += num_worth(scores + offset, places + first, before + first, end - first, num_candidates, rule);
      for (int32_t r = starts[b] + stays; r < starts[b] + 1 + end - first; ++r) {
        if (r >= 0 && r < num_hidden) rows[r] = 0;
      }
    }
    kept[b] = stays;
  }
  __syncthreads();
  // Rows move to the front, kThreads at a time. Writes stay within what all threads have read before the sum, so no
  // other barrier is needed.
  int32_t num_before = 0;
  for (int32_t base = 0; base < num_listed; base += kThreads) {
    const int32_t r = base + static_cast<int32_t>(threadIdx.x);
    const bool stays = r < num_hidden && rows[r] != 0;
    uint64_t total = 0;
    const uint64_t place = block_exclusive_sum(stays, &total);
    if (stays) rows[num_before + static_cast<int32_t>(place)] = r;
    num_before += static_cast<int32_t>(total);
  }
  for (int32_t r = num_before + static_cast<int32_t>(threadIdx.x); r < num_listed; r += kThreads) rows[r] = -1;
}

}  // namespace faser

// scores fp32 [num_drafts, num_candidates]; places int32, before fp32 [num_drafts]; cu_drafts int32 [num_requests + 1]:
// each request's range of drafts; starts int32 [num_requests]: its first hidden row. A request has one row more than
// drafts, and keeps those up to the row that verifies the first draft not worth a row after it. rule fp32 [5]: rank,
// gap, survival, intercept, least. kept int32 [num_requests]; rows int32 [num_listed]: ascending, -1 after the last;
// num_listed >= num_hidden.
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    prune_rows(const float* scores, const int32_t* places, const float* before, const int32_t* cu_drafts,
               const int32_t* starts, const float* rule, int32_t num_requests, int32_t num_drafts,
               int32_t num_candidates, int32_t num_hidden, int32_t num_listed, int32_t* kept, int32_t* rows) {
  faser::prune(scores, places, before, cu_drafts, starts, rule, num_requests, num_drafts, num_candidates, num_hidden,
               num_listed, kept, rows);
}

// The same for a TensorRT plugin, which knows a dimension only by an input that has it: positions [num_listed].
extern "C" __global__ void __launch_bounds__(faser::kThreads)
    prune_rows_of_positions(const float* scores, const int32_t* places, const float* before, const int32_t* cu_drafts,
                            const int32_t* starts, const float* rule, const int32_t* /*positions*/,
                            int32_t num_requests, int32_t num_drafts, int32_t num_candidates, int32_t num_hidden,
                            int32_t num_listed, int32_t* kept, int32_t* rows) {
  faser::prune(scores, places, before, cu_drafts, starts, rule, num_requests, num_drafts, num_candidates, num_hidden,
               num_listed, kept, rows);
}
