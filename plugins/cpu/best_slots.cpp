// Chooses the slots that pay: slots ranked by survival over all requests, as many as the measured costs justify.
//
// ops/best_slots.py computes the same, operation by operation.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"

namespace faser {
namespace {

struct Slot {
  double survival;
  int32_t place, request;
};

// Buffers of the calling thread; they grow to the largest batch seen and are then reused.
struct SlotScratch {
  std::vector<Slot> slots;
  std::vector<int32_t> active;  // requests that draft so far, by position
};

SlotScratch& scratch() {
  thread_local SlotScratch buffers;
  return buffers;
}

// On ties the earlier position comes first, then the earlier request, so that a request's slots keep their order.
bool goes_first(const Slot& a, const Slot& b) {
  if (a.survival != b.survival) return a.survival > b.survival;
  return a.place != b.place ? a.place < b.place : a.request < b.request;
}

double score_of(const faser_slot_costs& costs, double tokens, double ms) {
  return costs.price > 0.0 ? tokens - costs.price * ms : tokens / ms;
}

// Finds the best number of slots in scratch(). If drafting is still to be paid for, also the best longest length: the
// first slot at a position costs a whole draft step, so a shallow plan may beat one with the most likely slots.
double choose(const faser_slot_costs& costs, int32_t num_requests, int32_t stride, int32_t* out_lengths) {
  std::vector<Slot>& slots = scratch().slots;
  std::vector<int32_t>& active = scratch().active;
  std::sort(slots.begin(), slots.end(), goes_first);
  size_t best = 0;
  int32_t best_longest = stride;
  double best_score = costs.price > 0.0 ? score_of(costs, costs.base_tokens, costs.verify_ms[0]) : 0.0;
  for (int32_t longest = costs.draft_step_ms != nullptr ? 1 : stride; longest <= stride; ++longest) {
    active.assign(static_cast<size_t>(stride), 0);
    double tokens = costs.base_tokens, draft_ms = 0.0;
    size_t count = 0;
    for (const Slot& slot : slots) {
      if (slot.place >= longest) continue;
      ++count;
      tokens += slot.survival;
      if (costs.draft_step_ms != nullptr) {
        const double* step_ms = slot.place == 0 ? costs.draft_first_ms : costs.draft_step_ms;
        const int32_t now = ++active[static_cast<size_t>(slot.place)];
        draft_ms += step_ms[now] - step_ms[now - 1];
      }
      if (count % static_cast<size_t>(costs.multiple) != 0) continue;
      const size_t cost = std::min(count, static_cast<size_t>(costs.num_costs) - 1);
      const double score = score_of(costs, tokens, draft_ms + costs.verify_ms[cost] + costs.fixed_ms);
      if (score > best_score) {
        best = count;
        best_longest = longest;
        best_score = score;
      }
    }
  }
  std::fill(out_lengths, out_lengths + num_requests, 0);
  for (const Slot& slot : slots) {
    if (slot.place >= best_longest) continue;
    if (best-- == 0) break;
    ++out_lengths[slot.request];
  }
  return best_score;
}

bool are_valid(const faser_slot_costs& costs) { return costs.num_costs > 0 && costs.multiple > 0; }

}  // namespace
}  // namespace faser

int32_t faser_best_slots(const faser_slot_costs* costs, int32_t num_requests, int32_t stride, const double* survival,
                         const int32_t* limits, int32_t* out_lengths, double* out_score) {
  if (num_requests < 0 || stride < 1 || !faser::are_valid(*costs)) return FASER_BAD_ARGUMENT;
  std::vector<faser::Slot>& slots = faser::scratch().slots;
  slots.clear();
  for (int32_t i = 0; i < num_requests; ++i) {
    if (limits[i] > stride) return FASER_BAD_ARGUMENT;
    const double* row = survival + static_cast<size_t>(i) * static_cast<size_t>(stride);
    for (int32_t j = 0; j < limits[i]; ++j) slots.push_back({row[j], j, i});
  }
  *out_score = faser::choose(*costs, num_requests, stride, out_lengths);
  return FASER_OK;
}

int32_t faser_verify_lengths(const faser_slot_costs* costs, const faser_acceptance* acceptance, int32_t num_requests,
                             const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                             const int32_t* num_pending, int32_t* out_lengths) {
  const int32_t stride = acceptance->stride;
  if (num_requests < 0 || stride < 1 || !faser::are_valid(*costs)) return FASER_BAD_ARGUMENT;
  std::vector<faser::Slot>& ranked = faser::scratch().slots;
  ranked.clear();
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (num_tokens[i] < 0 || num_pending[i] < 0 || num_pending[i] > stride) return FASER_BAD_ARGUMENT;
    if (num_pending[i] > 0 && s.draft_margins == nullptr) return FASER_BAD_ARGUMENT;
    double survival = 1.0;
    for (int32_t j = 0; j < num_pending[i]; ++j) {
      const float stored = s.draft_margins[num_tokens[i] + j];
      const double margin = faser::capped_margin(*acceptance, stored);
      survival *= faser::is_certain(s, num_tokens[i] + j) ? faser::sigmoid(static_cast<double>(stored))
                                                          : faser::acceptance_of(*acceptance, s.mode, j, margin);
      ranked.push_back({survival, j, i});
    }
  }
  faser::choose(*costs, num_requests, stride, out_lengths);
  return FASER_OK;
}
