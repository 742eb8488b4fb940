// Draws draft tokens.
#include "sample.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "draw.h"
#include "parallel.h"
#include "philox.h"
#include "probs.h"
#include "row_kernels.h"
#include "scratch.h"

namespace faser {
namespace {

constexpr float kLargestMargin = 1e4f;

// Stores the margin and candidates of the draft at this position, for policies and early exit.
void keep_confidence(const faser_sampling& s, const EditedRow& row, int32_t vocab_size, int32_t position, int32_t token,
                     float margin) {
  if (s.draft_margins != nullptr) s.draft_margins[position] = std::min(margin, kLargestMargin);
  if (s.draft_candidates == nullptr) return;
  int32_t* candidates = s.draft_candidates + static_cast<size_t>(position) * FASER_NUM_CANDIDATES;
  int32_t* end = candidates + FASER_NUM_CANDIDATES;
  top_ids(row.x, vocab_size, FASER_NUM_CANDIDATES, candidates);
  if (std::find(candidates, end, token) == end) end[-1] = token;
}

// Returns the best of the row's entries other than the token.
int32_t best_other(const EditedRow& row, int32_t vocab_size, int32_t token) {
  int32_t best[2];
  top_ids(row.x, vocab_size, 2, best);
  return best[best[0] == token ? 1 : 0];
}

}  // namespace

int32_t sample_draft(faser_sampling* s, const float* logits, int32_t vocab_size, int32_t num_known,
                     int32_t max_draft_len) {
  EditedRow row;
  const bool wants_margin = s->draft_margins != nullptr;
  if (edited_row(*s, logits, vocab_size, num_known, wants_margin, &row) != FASER_ROW_OK) return -1;
  int32_t token = -1;
  GumbelLead lead = {0.0, -1};
  float margin = wants_margin ? row.max - row.second : 0.0f;
  if (s->mode == FASER_GREEDY) {
    token = first_index_of(row.x, vocab_size, row.max);
  } else if (s->mode == FASER_SEEDED) {
    float* q = probs_scratch(vocab_size);
    probs_of_row(*s, row, vocab_size, q);
    const bool wants_lead = wants_margin || s->draft_runners_up != nullptr;
    token = gumbel_max_token(q, vocab_size, s->key, static_cast<uint64_t>(num_known), wants_lead ? &lead : nullptr);
    margin = static_cast<float>(static_cast<double>(s->temperature) * lead.log_odds);
  } else {
    float* q = s->draft_probs + static_cast<size_t>(num_known % max_draft_len) * static_cast<size_t>(vocab_size);
    probs_of_row(*s, row, vocab_size, q);
    token = draw_token(q, vocab_size, uniform(s->key, s->draft_counter++, kDraftStream));
  }
  s->tokens[num_known] = token;
  if (s->draft_sources != nullptr) s->draft_sources[num_known] = FASER_BY_MODEL;
  if (s->draft_runners_up != nullptr)
    s->draft_runners_up[num_known] = s->mode == FASER_SEEDED ? lead.runner_up : best_other(row, vocab_size, token);
  keep_confidence(*s, row, vocab_size, num_known, token, margin);
  return token;
}

int32_t sample_drafts(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                      const float* const* logits, int32_t vocab_size, const int32_t* num_known, int32_t max_draft_len,
                      int32_t* out_tokens) {
  bool all_greedy = true;
  faser_fill_masks fill_masks = nullptr;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (s.tokens == nullptr || num_known[i] <= 0 || (s.mode == FASER_SAMPLED && s.draft_probs == nullptr))
      return FASER_BAD_ARGUMENT;
    all_greedy &= s.mode == FASER_GREEDY;
    if (s.fill_masks != nullptr) fill_masks = s.fill_masks;
  }
  if (fill_masks != nullptr) fill_masks(num_requests, slots, num_known);
  for_each_request(pool, num_requests, num_requests, vocab_size, all_greedy, [&](int i) {
    out_tokens[i] = sample_draft(&sampling[slots[i]], logits[i], vocab_size, num_known[i], max_draft_len);
  });
  return FASER_OK;
}

}  // namespace faser

int32_t faser_sample_draft(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const float* logits, int32_t logits_stride, int32_t vocab_size, const int32_t* num_known,
                           int32_t max_draft_len, int32_t* out_tokens) {
  if (num_requests < 0 || vocab_size <= 0 || logits_stride < vocab_size || max_draft_len <= 0) {
    return FASER_BAD_ARGUMENT;
  }
  thread_local std::vector<const float*> rows;
  rows.resize(static_cast<size_t>(num_requests));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = logits + i * static_cast<size_t>(logits_stride);
  return faser::sample_drafts(pool, num_requests, slots, sampling, rows.data(), vocab_size, num_known, max_draft_len,
                              out_tokens);
}
