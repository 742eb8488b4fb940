// Which pending drafts get a row: slots of all requests, ranked by their live survival, bought at one price.
//
// ops/frontier.py computes the same, operation by operation.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "faser_cpu.h"
#include "sigmoid.h"

namespace faser {
namespace {

constexpr int32_t kNumModes = 3;

struct Slot {
  double worth;
  int32_t request;
};

// Buffers of the calling thread; they grow to the largest batch seen, then stay.
struct FrontierScratch {
  std::vector<double> ahead;
  std::vector<Slot> slots;
};

double acceptance(const faser_frontier_rule& rule, int32_t i, int32_t place, float margin) {
  const int32_t at = rule.modes[i] * rule.stride + place;
  const double m = static_cast<double>(margin) < rule.max_margin ? static_cast<double>(margin) : rule.max_margin;
  const double slope = static_cast<double>(rule.slope[at]), intercept = static_cast<double>(rule.intercept[at]);
  return sigmoid(slope * m + intercept + rule.offset[i]);
}

// Before drafting.
double expected_acceptance(const faser_frontier_rule& rule, int32_t i, int32_t place) {
  return sigmoid(rule.prior[rule.modes[i] * rule.stride + place] + rule.offset[i]);
}

// How many of the best slots pay: the most of survivals - price * ms, over their number, 0 included.
int32_t num_paying(const std::vector<double>& ranked, const double* verify_ms, double price) {
  int32_t best = 0, count = 0;
  double best_worth = -price * verify_ms[0], gained = 0.0;
  for (const double survival : ranked) {
    gained += survival;
    const double worth = gained - price * verify_ms[++count];
    if (worth > best_worth) {
      best = count;
      best_worth = worth;
    }
  }
  return best;
}

// A request alone is decided place by place, on what is known up to the place.
int32_t length_alone(const faser_frontier_rule& rule, const float* margins, int32_t num_pending) {
  double alive = 1.0;
  for (int32_t j = 0; j < num_pending; ++j) {
    alive *= acceptance(rule, 0, j, margins[j]);
    const double floor_ms = rule.verify_ms[j];
    double expected = alive, worth = alive;
    bool pays = worth > rule.price * (rule.verify_ms[j + 1] - floor_ms);
    for (int32_t ahead = j + 1; !pays && ahead < rule.num_ahead; ++ahead) {
      expected *= expected_acceptance(rule, 0, ahead);
      worth += expected;
      pays = worth > rule.price * (rule.verify_ms[ahead + 1] - floor_ms);
    }
    if (!pays) return j;
  }
  return num_pending;
}

}  // namespace
}  // namespace faser

int32_t faser_frontier(const faser_frontier_rule* rule, const int32_t* num_tokens, const int32_t* num_pending,
                       int32_t* out_lengths) {
  const int32_t n = rule->num_requests;
  if (rule->num_ahead < 1 || rule->num_ahead > rule->stride) return FASER_BAD_ARGUMENT;
  int32_t total = 0;
  for (int32_t i = 0; i < n; ++i) {
    const bool is_mode = rule->modes[i] >= 0 && rule->modes[i] < faser::kNumModes;
    if (!is_mode || num_tokens[i] < 0 || num_pending[i] < 0 || num_pending[i] > rule->stride) return FASER_BAD_ARGUMENT;
    out_lengths[i] = num_pending[i];
    total += num_pending[i];
  }
  if (n == 1) {
    out_lengths[0] = faser::length_alone(*rule, rule->draft_margins[0] + num_tokens[0], num_pending[0]);
    return FASER_OK;
  }
  thread_local faser::FrontierScratch scratch;
  scratch.ahead.clear();
  for (int32_t i = 0; i < n; ++i) {
    if (num_pending[i] == 0) continue;
    double expected = faser::acceptance(*rule, i, 0, rule->draft_margins[i][num_tokens[i]]) * rule->weight[i];
    scratch.ahead.push_back(expected);
    for (int32_t j = 1; j < rule->num_ahead; ++j) {
      expected *= faser::expected_acceptance(*rule, i, j);
      scratch.ahead.push_back(expected);
    }
  }
  std::sort(scratch.ahead.begin(), scratch.ahead.end(), std::greater<double>());
  const int32_t num_slots = faser::num_paying(scratch.ahead, rule->verify_ms, rule->price);
  if (num_slots >= total) return FASER_OK;

  scratch.slots.clear();
  for (int32_t i = 0; i < n; ++i) {
    double alive = 1.0;
    for (int32_t j = 0; j < num_pending[i]; ++j) {
      alive *= faser::acceptance(*rule, i, j, rule->draft_margins[i][num_tokens[i] + j]);
      scratch.slots.push_back({alive * rule->weight[i], i});
    }
    out_lengths[i] = 0;
  }
  // Of equals the slots of the earlier request run; those of one request are alike, so only their number counts.
  const auto end = scratch.slots.begin() + num_slots;
  std::nth_element(scratch.slots.begin(), end, scratch.slots.end(), [](const faser::Slot& a, const faser::Slot& b) {
    return a.worth > b.worth || (a.worth == b.worth && a.request < b.request);
  });
  for (auto slot = scratch.slots.begin(); slot != end; ++slot) ++out_lengths[slot->request];
  return FASER_OK;
}
