// Distributions of a block's drafts that depend on the draft before: Markov head (DSpark), candidate selector
// (DFlash2).
#include <algorithm>
#include <cstring>
#include <limits>

#include "engine.h"
#include "row_kernels.h"

using faser::Gemm;
using faser::num_pairs;
using faser::num_panels;
using faser::Team;

namespace {

float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

void faser_engine::add_markov(int count, const int32_t* token_ids, float* const* logits) {
  const int rank = block_.markov_rank, stride = num_pairs(rank);
  const int64_t work = static_cast<int64_t>(count + 3) * rank * model_.vocab_size;
  run_timed(count, work, 1, [&](const Team& team) {
    for (int i = team.begin(count); i < team.end(count); i++) {
      float* row = markov_rows_ + static_cast<size_t>(i) * 2 * stride;
      kernels_.embed_row(block_.markov_in + static_cast<size_t>(token_ids[i]) * rank, rank, row, 2 * stride);
      kernels_.round_row(row, 2 * stride, pairs(x_markov_, i, stride));
    }
    team.sync();
    const Gemm gemm = {{block_.markov_out, nullptr, 16, 0, stride}, nullptr, x_markov_, stride, count};
    const int panels = num_panels(model_.vocab_size);
    kernels_.gemm(gemm, team.begin(panels), team.end(panels), markov_logits_, logits_stride());
    team.sync();
    for (int i = team.begin(count); i < team.end(count); i++) {
      const float* added = markov_logits_ + static_cast<size_t>(i) * logits_stride();
      for (int j = 0; j < model_.vocab_size; j++) logits[i][j] += added[j];
    }
  });
}

// Leaves only the best candidates of a row of logits. hidden: the row's, times selector_proj.
void faser_engine::select_candidates(int32_t token_id, const float* hidden, float* logits) const {
  const int rank = block_.selector_rank, count = block_.selector_top_k;
  int32_t ids[faser::kMaxSelected];
  float scores[faser::kMaxSelected];
  faser::top_ids(logits, model_.vocab_size, count, ids);
  const uint16_t* before = block_.predecessors + static_cast<size_t>(token_id) * rank;
  for (int i = 0; i < count; i++) {
    if (ids[i] < 0) continue;
    const uint16_t* after = block_.successors + static_cast<size_t>(ids[i]) * rank;
    float sum = 0.0f;
    for (int r = 0; r < rank; r++) sum += from_bfloat16(before[r]) * hidden[r] * from_bfloat16(after[r]);
    scores[i] = logits[ids[i]] + sum;
  }
  std::fill(logits, logits + model_.vocab_size, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < count; i++)
    if (ids[i] >= 0) logits[ids[i]] = scores[i];
}

void faser_engine::add_previous(int count, const int32_t* token_ids, const float* all_logits, float* const* logits) {
  if (block_.markov_rank > 0) add_markov(count, token_ids, logits);
  if (block_.selector_rank == 0) return;
  pool_->parallel_for(count, [&](int i) {
    const size_t row = static_cast<size_t>(logits[i] - all_logits) / static_cast<size_t>(logits_stride());
    select_candidates(token_ids[i], selector_rows_ + row * selector_stride_, logits[i]);
  });
}
