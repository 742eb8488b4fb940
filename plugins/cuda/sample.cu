// Draft tokens: sample_rows draws one per request with a block per row of logits, and keeps the distribution that it
// was drawn from. For larger vocabularies several blocks process a row in stages, as in accept.cu. Then sample_advance,
// one block, counts the drawn tokens and decides which requests continue.
//
// The arithmetic is that of the native library, so the tokens are the same.
//
// limits of sample_rows: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
// limits of sample_whole: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
// limits: registers <= 64, spill_bytes <= 128, shared_bytes <= 16384
#include "sampling/draft.cuh"
#include "sampling/draft_parts.cuh"

namespace faser {

constexpr int kAdvanceThreads = 256;
constexpr int kNumModes = 3;

struct AdvanceShared {
  double worths[kAdvanceThreads];
  bool pays;
};

__device__ inline double sigmoid(double z) {
  const double e = exp(z < 0.0 ? z : -z);
  return (z < 0.0 ? e : 1.0) / (1.0 + e);
}

// A stage for the rows of a larger vocabulary.
template <Stage kStage>
__device__ void sample_parts(const SampleRows& a, void* memory) {
  __shared__ DraftShared shared;
  DraftParts parts = {a, Workspace(memory, a.vocab_size), &shared};
  if constexpr (kStage == kScan) {
    if (blockIdx.x == 0 && blockIdx.y == 0) parts.workspace.begin();
    parts.scan(blockIdx.y, blockIdx.x);
  } else {
    parts.workspace.for_each_listed<kStage>([&](int32_t request, int32_t part) {
      if constexpr (kStage == kWeigh) parts.weigh(request, part);
      if constexpr (kStage == kRank) parts.rank(request, part);
      if constexpr (kStage == kDraw) parts.draw(request, part);
      if constexpr (kStage == kWhole) parts.whole(request);
    });
  }
}

}  // namespace faser

// Each of num_requests requests has a row of logits and an entry of sampling. known: tokens so far; remaining: tokens
// still wanted, 0 for none; slots: rows of draft_probs [num_slots, max_draft_len, vocab_size]; step: the number of
// earlier draws in this call, at which tokens, margins [max_draft_len, max_requests], candidates [max_draft_len,
// max_requests, 8] and, unless null, runners_up [max_draft_len, max_requests] are written. edited_logits, the stages
// and their workspace, for num_requests rows, are as in accept.cu.
#define FASER_SAMPLE_ARGUMENTS                                                                                   \
  const faser::Sampling *sampling, const float *logits, const int32_t *known, const int32_t *remaining,          \
      const int32_t *slots, const int32_t *step, int32_t num_requests, int32_t max_requests, int32_t vocab_size, \
      int32_t logits_stride, int32_t max_draft_len, int32_t num_slots, float *edited_logits, float *draft_probs, \
      int32_t *tokens, float *margins, int32_t *candidates, int32_t *runners_up
#define FASER_SAMPLE_ROWS                                                                                   \
  faser::SampleRows {                                                                                       \
    sampling, logits, known, remaining, slots, step, num_requests, max_requests, vocab_size, logits_stride, \
        max_draft_len, num_slots, edited_logits, draft_probs, tokens, margins, candidates, runners_up       \
  }
#define FASER_SAMPLE_STAGE(STAGE, NAME, BLOCKS)                         \
  extern "C" __global__ void __launch_bounds__(faser::kThreads, BLOCKS) \
      NAME(FASER_SAMPLE_ARGUMENTS, void* workspace) {                   \
    faser::sample_parts<faser::STAGE>(FASER_SAMPLE_ROWS, workspace);    \
  }

extern "C" __global__ void __launch_bounds__(faser::kThreads, 1) sample_rows(FASER_SAMPLE_ARGUMENTS) {
  using namespace faser;
  __shared__ RowShared shared;
  const SampleRows a = FASER_SAMPLE_ROWS;
  const int32_t request = blockIdx.x;
  if (request >= num_requests || !a.is_step()) return;
  uint64_t ranks[kNumCandidates] = {};
  Drawn drawn = {-1, 0.0f, -1};
  if (a.is_drawing(request) && a.edit(request, 0, vocab_size)) {
    const Sampling& s = sampling[request];
    const Row<float> row = a.entries(request, has_edits(s, known[request]));
    drawn = draw_row(s, row, known[request], *step, a.kept_probs(request), runners_up != nullptr, ranks, &shared);
  }
  a.write(request, drawn, ranks);
}
FASER_SAMPLE_STAGE(kScan, sample_scan, 2)
FASER_SAMPLE_STAGE(kWeigh, sample_weigh, 2)
FASER_SAMPLE_STAGE(kRank, sample_rank, 2)
FASER_SAMPLE_STAGE(kDraw, sample_draw, 2)
FASER_SAMPLE_STAGE(kWhole, sample_whole, 1)

// Runs after sample_rows, by one block. tables: slope, intercept, prior and spread [4, 3 modes, width], row_price
// [width], step_price [max_requests + 1] of core/decision.py DraftStop. newest: the drawn tokens. history: whether a
// drawn token is written after the known ones of its entry of sampling. Updates known, remaining, pending drafts,
// survival and step; num_going: how many requests continue.
extern "C" __global__ void __launch_bounds__(faser::kAdvanceThreads)
    sample_advance(const faser::Sampling* sampling, const int32_t* tokens, const float* margins, const int32_t* modes,
                   const float* tables, const float* row_price, const float* step_price, int32_t num_requests,
                   int32_t max_requests, int32_t max_draft_len, int32_t width, int32_t history, int32_t* newest,
                   int32_t* known, int32_t* remaining, int32_t* pending, double* survival, int32_t* step,
                   int32_t* num_going) {
  using namespace faser;
  __shared__ AdvanceShared shared;
  const int32_t place = *step;
  if (place < 0 || place >= max_draft_len) {
    if (threadIdx.x == 0) *num_going = 0;  // ends a loop that runs while requests continue
    return;
  }
  double gain = 0.0;
  int32_t count = 0;
  for (int32_t start = 0; start < num_requests; start += kAdvanceThreads) {
    const int32_t request = start + static_cast<int32_t>(threadIdx.x);
    double worth = -1.0;
    if (request < num_requests) {
      const int64_t at = static_cast<int64_t>(place) * max_requests + request;
      const int32_t token = tokens[at];
      const bool is_new = token >= 0 && remaining[request] > 0;
      const int32_t left = is_new ? remaining[request] - 1 : 0;
      newest[request] = is_new ? token : 0;
      if (is_new) {
        const int32_t position = known[request];
        if (history != 0) const_cast<int32_t*>(sampling[request].tokens)[position] = token;
        known[request] = position + 1;
      }
      if (left > 0) {
        const int32_t mode = clamp(modes[request], 0, kNumModes - 1);
        const int32_t drafts = clamp(pending[request], 0, width - 1), next = clamp(drafts + 1, 0, width - 1);
        const double z = static_cast<double>(tables[mode * width + drafts]) * static_cast<double>(margins[at]) +
                         static_cast<double>(tables[(kNumModes + mode) * width + drafts]);
        const double reached = survival[request] * sigmoid(z);
        survival[request] = reached;
        pending[request] = drafts + 1;
        const double prior = static_cast<double>(tables[(2 * kNumModes + mode) * width + next]);
        const double spread = static_cast<double>(tables[(3 * kNumModes + mode) * width + next]);
        const double row = static_cast<double>(row_price[next]);
        const double high = reached * (prior + spread) - row, low = reached * (prior - spread) - row;
        worth = high < 0.0 ? high : 0.5 * (high + fmax(low, 0.0));
      }
      remaining[request] = worth >= 0.0 ? left : 0;
    }
    shared.worths[threadIdx.x] = worth;
    __syncthreads();
    if (threadIdx.x == 0) {  // in the order of the requests, as on the host
      for (int i = 0; i < kAdvanceThreads; ++i) {
        if (shared.worths[i] >= 0.0) {
          gain += shared.worths[i];
          ++count;
        }
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const bool pays = gain >= static_cast<double>(step_price[count <= max_requests ? count : max_requests]);
    shared.pays = pays;
    *num_going = pays ? count : 0;
    *step = place + 1;
  }
  __syncthreads();
  if (shared.pays) return;
  for (int32_t request = threadIdx.x; request < num_requests; request += kAdvanceThreads) remaining[request] = 0;
}
