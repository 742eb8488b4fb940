// Finds what a segment boundary compares for pending drafts; ops/requests/exit_drafts.py and ops/acceptance.py compute
// the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "acceptance.h"
#include "faser_cpu.h"

int32_t faser_log_odds(const faser_acceptance* acceptance, double max_log_odds, int32_t num_requests,
                       const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                       const int32_t* num_drafts, float* out) {
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (num_tokens[i] < 0 || num_drafts[i] > acceptance->stride) return FASER_BAD_ARGUMENT;
    if (num_drafts[i] > 0 && s.draft_margins == nullptr) return FASER_BAD_ARGUMENT;
    for (int32_t j = 0; j < num_drafts[i]; ++j) {
      const int32_t position = num_tokens[i] + j, at = s.mode * acceptance->stride + j;
      const float margin = s.draft_margins[position];
      const double odds = faser::is_certain(s, position)
                              ? static_cast<double>(margin)
                              : static_cast<double>(acceptance->slope[at]) * faser::capped_margin(*acceptance, margin) +
                                    static_cast<double>(acceptance->intercept[at]);
      *out++ = static_cast<float>(std::min(std::max(odds, -max_log_odds), max_log_odds));
    }
  }
  return FASER_OK;
}

int32_t faser_exit_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_drafts, int32_t* out_candidates,
                          int32_t* out_places) {
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (num_tokens[i] < 0 || (num_drafts[i] > 0 && (s.tokens == nullptr || s.draft_candidates == nullptr))) {
      return FASER_BAD_ARGUMENT;
    }
    for (int32_t j = 0; j < num_drafts[i]; ++j) {
      const size_t position = static_cast<size_t>(num_tokens[i] + j);
      const int32_t* from = s.draft_candidates + position * FASER_NUM_CANDIDATES;
      out_candidates = std::copy(from, from + FASER_NUM_CANDIDATES, out_candidates);
      const int32_t* found = std::find(from, from + FASER_NUM_CANDIDATES, s.tokens[position]);
      *out_places++ = found == from + FASER_NUM_CANDIDATES ? 0 : static_cast<int32_t>(found - from);
    }
  }
  return FASER_OK;
}
