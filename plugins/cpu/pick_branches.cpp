// Which tokens are worth a row beside the drafts; ops/trees/pick_branches.py computes the same.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"

namespace faser {
namespace {

// Of rejections those that the runner-up recovers, by sampling mode, measured on the demo pair.
constexpr double kShare[] = {0.6, 0.43, 0.29};

struct Branch {
  double worth;
  int32_t place, token;
};

void collect(const faser_sampling& s, int32_t num_tokens, int32_t num_places, const faser_acceptance* acceptance,
             std::vector<Branch>* found) {
  double survival = 1.0;
  found->clear();
  for (int32_t place = 0; place < num_places; ++place) {
    const int32_t position = num_tokens + place;
    const float stored = s.draft_margins[position];
    const bool is_sure = is_certain(s, position);
    const double accepted = acceptance == nullptr || is_sure
                                ? sigmoid(static_cast<double>(stored))
                                : acceptance_of(*acceptance, s.mode, place, capped_margin(*acceptance, stored));
    const int32_t token = is_sure ? -1 : s.draft_runners_up[position];
    if (token >= 0) found->push_back({kShare[s.mode] * survival * (1.0 - accepted), place, token});
    survival *= accepted;
  }
}

}  // namespace
}  // namespace faser

int32_t faser_pick_branches(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_pending, const int32_t* num_verified,
                            const faser_acceptance* acceptance, double min_worth, int32_t max_branches, int32_t max_num,
                            int32_t* out_requests, int32_t* out_places, int32_t* out_tokens) {
  if (num_requests < 0 || max_branches < 0 || max_num < 0) return FASER_BAD_ARGUMENT;
  static thread_local std::vector<faser::Branch> found;
  int32_t num = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    const int32_t num_places = std::min(num_verified[i] + 1, num_pending[i]);
    if (num_places <= 0) continue;
    if (num_verified[i] < 0 || num_tokens[i] < 0 || s.tokens == nullptr || s.draft_margins == nullptr ||
        s.draft_runners_up == nullptr || (acceptance != nullptr && num_places > acceptance->stride))
      return FASER_BAD_ARGUMENT;
    faser::collect(s, num_tokens[i], num_places, acceptance, &found);
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.worth > b.worth; });
    size_t count = std::min(found.size(), static_cast<size_t>(std::min(max_branches, max_num - num)));
    while (count > 0 && found[count - 1].worth < min_worth) --count;
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
