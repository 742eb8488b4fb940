#include "draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "row_kernels.h"

namespace faser {
namespace {

constexpr int32_t kBlock = 1024;

bool any_positive(const float* p, int32_t n) {
  bool any = false;
  for (int32_t i = 0; i < n; ++i) any |= p[i] > 0.0f;
  return any;
}

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
  // Rounding kept the running sum from reaching what was wanted: the last token that can be drawn.
  for (int32_t i = n - 1; i >= 0; --i) {
    if (weights[i] > 0.0f) return i;
  }
  return -1;
}

int32_t race_token(const float* p, int32_t n, uint64_t key, uint64_t position) {
  double uniforms[kNoiseTokens];
  double best = std::numeric_limits<double>::infinity();
  int32_t token = -1;
  for (int32_t start = 0; start < n; start += kNoiseTokens) {
    const int32_t size = std::min(kNoiseTokens, n - start);
    if (!any_positive(p + start, size)) continue;
    race_noise(key, position, start, uniforms);
    for (int32_t i = 0; i < size; ++i) {
      const double weight = static_cast<double>(p[start + i]);
      // -log(1 - v) >= v: most tokens lose without a logarithm.
      if (!(weight > 0.0) || !(uniforms[i] < best * weight)) continue;
      const double time = -std::log1p(-uniforms[i]) / weight;
      if (time < best) {
        best = time;
        token = start + i;
      }
    }
  }
  return token;
}

}  // namespace faser
