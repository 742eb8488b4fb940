#include "draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gumbel_max.h"
#include "row_kernels.h"

namespace faser {
namespace {

constexpr int32_t kBlock = 1024;
constexpr float kRoundUp = 1.00001f;

}  // namespace

int32_t draw_token(const float* weights, int32_t n, double u) {
  double total = 0.0;
  for (int32_t start = 0; start < n; start += kBlock) total += row_sum(weights + start, std::min(kBlock, n - start));
  const double wanted = u * total;
  double reached = 0.0;
  int32_t start = 0;
  for (; start + kBlock < n; start += kBlock) {
    const double mass = row_sum(weights + start, kBlock);
    if (reached + mass > wanted) break;
    reached += mass;
  }
  for (int32_t i = start; i < n; ++i) {
    reached += static_cast<double>(weights[i]);
    if (reached > wanted) return i;
  }
  // Rounding kept the running sum below the wanted value: take the last token with a positive probability.
  for (int32_t i = n - 1; i >= 0; --i) {
    if (weights[i] > 0.0f) return i;
  }
  return -1;
}

int32_t gumbel_max_token(const float* p, int32_t n, uint64_t key, uint64_t position, GumbelLead* lead) {
  uint32_t words[kGumbelTokens];
  double best = std::numeric_limits<double>::infinity(), second = best;
  const double& bound = lead == nullptr ? best : second;  // later arrivals do not matter
  int32_t token = -1, runner_up = -1;
  for (int32_t start = 0; start < n; start += kGumbelTokens) {
    const int32_t size = std::min(kGumbelTokens, n - start);
    if (!any_positive(p + start, size)) continue;
    gumbel_words(key, position, start, words);
    // -log(1 - u) >= u, so most tokens lose by the leading bits of u, without a logarithm.
    if (!any_candidate(p + start, words, size, static_cast<float>(bound) * kRoundUp)) continue;
    for (int32_t i = 0; i < size; ++i) {
      const double weight = static_cast<double>(p[start + i]);
      if (!(weight > 0.0) || !(static_cast<double>(words[i]) * 0x1p-32 < bound * weight)) continue;
      const double u = gumbel_uniform(key, position, start + i, words[i]);
      const double time = -std::log1p(-u) / weight;
      if (time < best) {
        second = best;
        runner_up = token;
        best = time;
        token = start + i;
      } else if (time < second) {
        second = time;
        runner_up = start + i;
      }
    }
  }
  if (lead != nullptr) *lead = {std::log(second / best), runner_up};
  return token;
}

}  // namespace faser
