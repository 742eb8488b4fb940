// Chooses tokens that are worth a row next to the drafts; ops/requests/pick_branches.py computes the same.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"

namespace faser {
namespace {

// Share of rejections where the runner-up is recovered, by sampling mode, measured on the demo pair.
constexpr double kShare[] = {0.6, 0.43, 0.29};

struct Branch {
  double worth;
  int32_t place, token;
};

// Buffers of the calling thread. reached: chance that all drafts before a position are accepted, one position more.
struct Scratch {
  std::vector<Branch> found;
  std::vector<double> reached;
};

void collect(const faser_sampling& s, int32_t num_tokens, int32_t num_places, const faser_acceptance& acceptance,
             Scratch* scratch) {
  double survival = 1.0;
  scratch->found.clear();
  scratch->reached.assign(1, survival);
  for (int32_t place = 0; place < num_places; ++place) {
    const int32_t position = num_tokens + place;
    const float stored = s.draft_margins[position];
    const bool is_sure = is_certain(s, position);
    const double accepted = is_sure ? sigmoid(static_cast<double>(stored))
                                    : acceptance_of(acceptance, s.mode, place, capped_margin(acceptance, stored));
    const int32_t token = is_sure ? -1 : s.draft_runners_up[position];
    if (token >= 0) scratch->found.push_back({kShare[s.mode] * survival * (1.0 - accepted), place, token});
    survival *= accepted;
    scratch->reached.push_back(survival);
  }
}

// Returns how many of the best branches replace the chain's last rows, which are less likely to be reached. Each still
// has its row before it: a branch yields less than the row of its own position.
size_t trade_rows(const Scratch& scratch, size_t limit, int32_t* num_verified) {
  size_t count = 0;
  while (count < limit && *num_verified > 0 &&
         scratch.found[count].worth > scratch.reached[static_cast<size_t>(*num_verified)]) {
    ++count;
    --*num_verified;
  }
  return count;
}

}  // namespace
}  // namespace faser

int32_t faser_pick_branches(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_pending, int32_t* num_verified,
                            const faser_acceptance* acceptance, int32_t trades, double min_worth, int32_t max_branches,
                            int32_t max_num, int32_t* out_requests, int32_t* out_places, int32_t* out_tokens) {
  if (num_requests < 0 || max_branches < 0 || max_num < 0) return FASER_BAD_ARGUMENT;
  static thread_local faser::Scratch scratch;
  std::vector<faser::Branch>& found = scratch.found;
  int32_t num = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    const int32_t num_places = std::min(num_verified[i] + 1, num_pending[i]);
    if (num_places <= 0) continue;
    if (num_verified[i] < 0 || num_verified[i] > num_pending[i] || num_tokens[i] < 0 || s.tokens == nullptr ||
        s.draft_margins == nullptr || s.draft_runners_up == nullptr || num_places > acceptance->stride)
      return FASER_BAD_ARGUMENT;
    faser::collect(s, num_tokens[i], num_places, *acceptance, &scratch);
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.worth > b.worth; });
    size_t count = std::min(found.size(), static_cast<size_t>(std::min(max_branches, max_num - num)));
    while (count > 0 && found[count - 1].worth < min_worth) --count;
    if (trades != 0) count = faser::trade_rows(scratch, count, &num_verified[i]);
    std::sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count),
              [](const auto& a, const auto& b) { return a.place < b.place; });
    for (size_t b = 0; b < count; ++b, ++num) {
      out_requests[num] = i;
      out_places[num] = found[b].place;
      out_tokens[num] = found[b].token;
    }
  }
  return num;
}
