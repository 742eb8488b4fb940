// Sums over verified drafts, to fit acceptance to; ops/tested.py computes the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "acceptance.h"
#include "faser_cpu.h"

namespace faser {
namespace {

constexpr int32_t kCellSums = 7;

void add_test(const faser_test_sums& sums, double* cell, double p, double margin, bool passed) {
  const double y = passed ? 1.0 : 0.0, error = y - p, weight = p * (1.0 - p);
  cell[0] += 1.0;
  cell[1] += y;
  cell[2] += error * margin;
  cell[3] += error;
  cell[4] += weight * margin * margin;
  cell[5] += weight * margin;
  cell[6] += weight;
  const int32_t bin = std::min(static_cast<int32_t>(p * sums.num_bins), sums.num_bins - 1);
  sums.bins[bin] += 1.0;
  sums.bins[sums.num_bins + bin] += p;
  sums.bins[2 * sums.num_bins + bin] += y;
}

}  // namespace
}  // namespace faser

int32_t faser_add_tests(const faser_test_sums* sums, const faser_acceptance* acceptance, int32_t num_requests,
                        const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                        const int32_t* num_accepted, const int32_t* outcome) {
  const int32_t stride = acceptance->stride;
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t num_tested = num_accepted[i] + (outcome[i] == FASER_RECOVERED ? 1 : 0);
    if (num_tested == 0) continue;
    const faser_sampling& s = sampling[slots[i]];
    if (num_tokens[i] < 0 || num_tested > stride || s.draft_margins == nullptr) return FASER_BAD_ARGUMENT;
    for (int32_t j = 0; j < num_tested; ++j) {
      if (faser::is_certain(s, num_tokens[i] + j)) continue;
      const double margin = faser::capped_margin(*acceptance, s.draft_margins[num_tokens[i] + j]);
      const double p = faser::acceptance_of(*acceptance, s.mode, j, margin);
      double* cell = sums->cells + static_cast<size_t>(s.mode * stride + j) * faser::kCellSums;
      faser::add_test(*sums, cell, p, margin, j < num_accepted[i]);
    }
  }
  return FASER_OK;
}
