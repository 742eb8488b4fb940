// Commits the tokens of a step to the counts of their requests; lab/reference/requests/commit.py computes the same.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "faser_cpu.h"

namespace faser {
namespace {

// Returns the number of tokens before the first end id.
int32_t before_end(const faser_texts& text, const int32_t* tokens, int32_t count) {
  const int32_t* ids_end = text.end_ids + text.num_end_ids;
  for (int32_t j = 0; j < count; ++j) {
    if (std::find(text.end_ids, ids_end, tokens[j]) != ids_end) return j;
  }
  return count;
}

// Counts the drafts at positions begin to end - 1 that come from a prediction.
int32_t num_predicted(const int8_t* sources, int32_t begin, int32_t end) {
  if (begin >= end) return 0;
  return static_cast<int32_t>(std::count(sources + begin, sources + end, static_cast<int8_t>(FASER_BY_PREDICTION)));
}

int32_t due_of(const faser_block_bounds& bounds, const int32_t* count) {
  const bool is_full = count[FASER_NUM_COMPUTED] >= bounds.full || count[FASER_NUM_DRAFT_COMPUTED] >= bounds.draft_full;
  const bool is_spare = count[FASER_NUM_TOKENS] + count[FASER_NUM_DRAFTS] <= bounds.spare;
  return (is_full ? FASER_BLOCK_FULL : 0) | (is_spare ? FASER_BLOCK_SPARE : 0);
}

}  // namespace
}  // namespace faser

int32_t faser_commit(int32_t num_requests, int32_t num_sampled, const int32_t* slots, int32_t* counts, double* times_s,
                     const faser_texts* texts, const faser_block_bounds* bounds, double now_s, const int32_t* num_rows,
                     const int32_t* num_drafted, const int32_t* num_draft_computed, const int32_t* token_ids,
                     int32_t stride, const int32_t* num_new, const int32_t* num_accepted, const int32_t* outcome,
                     const int32_t* num_pruned, int32_t* out_num_new, int32_t* out_end, int32_t* out_due,
                     int32_t* out_tokens) {
  if (num_sampled > num_requests) return FASER_BAD_ARGUMENT;
  for (int32_t i = 0; i < num_requests; ++i) {
    if (texts[slots[i]].tokens == nullptr) return FASER_BAD_ARGUMENT;
  }
  for (int32_t i = 0; i < num_sampled; ++i) {
    if (num_new[i] < 0 || num_new[i] > stride || num_accepted[i] < 0 || num_accepted[i] > num_new[i]) {
      return FASER_BAD_ARGUMENT;
    }
  }
  for (int32_t i = 0; i < num_requests; ++i) {
    int32_t* count = counts + static_cast<ptrdiff_t>(slots[i]) * FASER_NUM_COUNTS;
    const faser_texts& text = texts[slots[i]];
    const int32_t known = count[FASER_NUM_TOKENS];
    out_num_new[i] = 0;
    out_end[i] = FASER_GOES_ON;
    count[FASER_NUM_DRAFTS] += num_drafted[i];
    count[FASER_NUM_DRAFTED] += num_drafted[i];
    if (i >= num_sampled) {
      count[FASER_NUM_COMPUTED] += num_rows[i];
      count[FASER_NUM_DRAFT_COMPUTED] = num_draft_computed[i];
      out_due[i] = faser::due_of(bounds[slots[i]], count);
      continue;
    }
    const int32_t* tokens = token_ids + static_cast<ptrdiff_t>(i) * stride;
    const int32_t end = known + num_new[i], kept = faser::before_end(text, tokens, num_new[i]);
    if (num_new[i] > 0) {
      std::memcpy(text.tokens + known, tokens, sizeof(int32_t) * static_cast<size_t>(num_new[i]));
      count[FASER_NUM_ACCEPTED] += std::min(num_accepted[i], kept);
      if (kept < num_accepted[i]) count[FASER_NUM_DRAFTED] -= count[FASER_NUM_DRAFTS] - (kept + 1);  // after the end
      count[FASER_NUM_STEPS] += 1;
      if (num_pruned != nullptr) count[FASER_NUM_PRUNED] += num_pruned[i];
      double* times = times_s + static_cast<ptrdiff_t>(slots[i]) * 2;
      if (std::isnan(times[0])) times[0] = now_s;
      times[1] = now_s;
    }
    // The last committed token has not been run: it was drawn or accepted on the previous row. The token after the
    // accepted drafts was drawn and differs from the draft at its position, so the draft model's KV ends before it.
    const bool stays = outcome[i] == FASER_STILL_PENDING;
    const int32_t pending = count[FASER_NUM_DRAFTS];
    count[FASER_NUM_DRAFTS] = stays ? count[FASER_NUM_DRAFTS] - num_accepted[i] : 0;
    count[FASER_NUM_DRAFT_COMPUTED] =
        stays ? num_draft_computed[i] : std::min({num_draft_computed[i], known + num_accepted[i], end - 1});
    if (text.draft_sources != nullptr) {
      const int32_t accepted = std::min(num_accepted[i], kept);
      const bool is_rejected = outcome[i] == FASER_RECOVERED && accepted == num_accepted[i];
      count[FASER_NUM_PREDICTED] += faser::num_predicted(text.draft_sources, known, known + accepted);
      count[FASER_NUM_MISPREDICTED] +=
          faser::num_predicted(text.draft_sources, known + accepted, known + (is_rejected ? pending : 0));
    }
    count[FASER_NUM_TOKENS] = known + kept;
    count[FASER_NUM_COMPUTED] = std::min(end - 1, known + kept);
    out_due[i] = faser::due_of(bounds[slots[i]], count);
    out_num_new[i] = kept;
    out_tokens = std::copy(tokens, tokens + kept, out_tokens);
    if (kept < num_new[i]) {
      out_end[i] = FASER_STOP;
    } else if (end >= count[FASER_MAX_NUM_TOKENS]) {
      out_end[i] = FASER_LENGTH;
    }
  }
  return FASER_OK;
}
