#include "row_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

// Dispatch needs ifunc (glibc); elsewhere the baseline instruction set gives the same bits more slowly.
// ThreadSanitizer is not initialized yet when the clone is chosen.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define FASER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASER_CLONES
#endif

namespace faser {
namespace {

constexpr int32_t kMappedInfinity = 0x7f800000;
// The value of MapBits for -inf; only NaNs with the sign bit are below it.
constexpr int32_t kMappedMinusInfinity = static_cast<int32_t>(0xff800000u ^ 0x7fffffffu);
constexpr int32_t kBlock = 64;
constexpr int32_t kSumLanes = 32;

// Maps floats to signed integers of the same order: integer maxima vectorise, float maxima with their NaN rules do
// not. It is its own inverse.
inline int32_t map_bits(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// exp(z) for z <= 0 within 2 ulp, 0 below -kMaxDepth, so that no probability is denormal. Each operation rounds once,
// so numpy computes the same bits.
inline float exp_non_positive(float z) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = z * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (z - n * 0.693359375f) - n * -2.12194440e-4f;
  float poly = 1.9875691500e-4f;
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = (poly * (r * r) + r) + 1.0f;
  const uint32_t exponent = static_cast<uint32_t>(bits_of(shifted)) << 23;
  const uint32_t keep = -static_cast<uint32_t>(z >= -kMaxDepth);
  const uint32_t bits = (static_cast<uint32_t>(bits_of(poly)) + exponent) & keep;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

FASER_CLONES
bool row_max(const float* x, int32_t n, float* max) {
  int32_t high = std::numeric_limits<int32_t>::min(), low = std::numeric_limits<int32_t>::max();
  for (int32_t i = 0; i < n; ++i) {
    const int32_t mapped = map_bits(bits_of(x[i]));
    high = mapped > high ? mapped : high;
    low = mapped < low ? mapped : low;
  }
  const int32_t bits = map_bits(high);
  std::memcpy(max, &bits, sizeof bits);
  return high < kMappedInfinity && low >= kMappedMinusInfinity;
}

FASER_CLONES
bool row_top2(const float* x, int32_t n, float* max, float* second) {
  // One running pair per lane, so that the loop vectorises; a tail is one more lane-wise step.
  typedef int32_t Ints __attribute__((vector_size(64)));
  constexpr int32_t kLanes = 16;
  constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
  Ints high = Ints{} + kLowest, next = high, low = Ints{} + std::numeric_limits<int32_t>::max();
  for (int32_t start = 0; start < n; start += kLanes) {
    Ints bits;
    if (start + kLanes <= n) {
      std::memcpy(&bits, x + start, sizeof bits);
    } else {
      bits = Ints{} + static_cast<int32_t>(0xff800000u);  // -inf
      std::memcpy(&bits, x + start, sizeof(float) * static_cast<size_t>(n - start));
    }
    const Ints mapped = bits ^ ((bits >> 31) & 0x7fffffff);
    low = mapped < low ? mapped : low;
    const Ints lesser = mapped < high ? mapped : high;
    next = lesser > next ? lesser : next;
    high = mapped > high ? mapped : high;
  }
  int32_t best = kLowest, runner_up = kMappedMinusInfinity, least = std::numeric_limits<int32_t>::max();
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    const int32_t lesser = high[lane] < best ? high[lane] : best;
    runner_up = lesser > runner_up ? lesser : runner_up;
    runner_up = next[lane] > runner_up ? next[lane] : runner_up;
    best = high[lane] > best ? high[lane] : best;
    least = low[lane] < least ? low[lane] : least;
  }
  const int32_t max_bits = map_bits(best), second_bits = map_bits(runner_up);
  std::memcpy(max, &max_bits, sizeof max_bits);
  std::memcpy(second, &second_bits, sizeof second_bits);
  return best < kMappedInfinity && least >= kMappedMinusInfinity;
}

// Returns a value that at least `count` entries exceed, so that a scan for the largest starts high: just below the
// count-th largest of the maxima of kBlock interleaved parts.
FASER_CLONES
float top_floor(const float* x, int32_t n, int32_t count) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  if (n < 2 * kBlock || count > kBlock) return kMinusInfinity;
  float maxima[kBlock];
  std::memcpy(maxima, x, sizeof maxima);
  for (int32_t start = kBlock; start + kBlock <= n; start += kBlock) {
    for (int32_t i = 0; i < kBlock; ++i) maxima[i] = x[start + i] > maxima[i] ? x[start + i] : maxima[i];
  }
  std::nth_element(maxima, maxima + count - 1, maxima + kBlock, std::greater<float>());
  return std::nextafter(maxima[count - 1], kMinusInfinity);
}

FASER_CLONES
void top_ids(const float* x, int32_t n, int32_t count, int32_t* ids) {
  int32_t num_ids = 0;
  float floor = top_floor(x, n, count);  // threshold for an entry to be included
  for (int32_t start = 0; start < n; start += kBlock) {
    const int32_t end = n - start < kBlock ? n : start + kBlock;
    int32_t any = 0;
    for (int32_t i = start; i < end; ++i) any |= x[i] > floor ? 1 : 0;
    if (!any) continue;
    for (int32_t i = start; i < end; ++i) {
      if (!(x[i] > floor)) continue;
      int32_t place = num_ids < count ? num_ids++ : count - 1;
      for (; place > 0 && x[ids[place - 1]] < x[i]; --place) ids[place] = ids[place - 1];
      ids[place] = i;
      if (num_ids == count) floor = x[ids[count - 1]];
    }
  }
  for (int32_t i = num_ids; i < count; ++i) ids[i] = -1;
}

FASER_CLONES
int32_t first_index_of(const float* x, int32_t n, float value) {
  int32_t start = 0;
  for (; start + kBlock <= n; start += kBlock) {
    int32_t found = 0;
    for (int32_t i = 0; i < kBlock; ++i) found |= x[start + i] == value ? 1 : 0;
    if (found) break;
  }
  for (int32_t i = start; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return n;
}

FASER_CLONES
void exp_row(const LogitsRow& row, float* out) {
  const float* x = row.x;
  const float max = row.max, inv_temperature = row.inv_temperature;
  const int32_t n = row.size;
  for (int32_t i = 0; i < n; ++i) out[i] = exp_non_positive((x[i] - max) * inv_temperature);
}

FASER_CLONES
int32_t count_within(const LogitsRow& row, float depth, const float* weights, double* mass) {
  const float* x = row.x;
  const float max = row.max, inv_temperature = row.inv_temperature;
  double masses[kSumLanes] = {};
  int32_t counts[kSumLanes] = {};
  for (int32_t start = 0; start < row.size; start += kSumLanes) {
    const int32_t size = row.size - start < kSumLanes ? row.size - start : kSumLanes;
    for (int32_t i = 0; i < size; ++i) {
      const int32_t within = (x[start + i] - max) * inv_temperature >= -depth ? 1 : 0;
      counts[i] += within;
      masses[i] += static_cast<double>(weights[start + i]) * static_cast<double>(within);
    }
  }
  int32_t count = 0;
  *mass = 0.0;
  for (int32_t i = 0; i < kSumLanes; ++i) {
    count += counts[i];
    *mass += masses[i];
  }
  return count;
}

FASER_CLONES
void collect_within(const LogitsRow& row, float depth, int32_t* ids) {
  const float* x = row.x;
  const float max = row.max, inv_temperature = row.inv_temperature;
  for (int32_t start = 0; start < row.size; start += kBlock) {
    const int32_t end = row.size - start < kBlock ? row.size : start + kBlock;
    int32_t any = 0;
    for (int32_t i = start; i < end; ++i) any |= (x[i] - max) * inv_temperature >= -depth ? 1 : 0;
    if (!any) continue;
    for (int32_t i = start; i < end; ++i) {
      if ((x[i] - max) * inv_temperature >= -depth) *ids++ = i;
    }
  }
}

FASER_CLONES
bool any_candidate(const float* p, const uint32_t* words, int32_t n, float bound) {
  int32_t any = 0;
  for (int32_t i = 0; i < n; ++i) {
    const float low = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1p-24f;
    any |= (p[i] > 0.0f) & (low <= bound * p[i]) ? 1 : 0;
  }
  return any != 0;
}

FASER_CLONES
bool any_positive(const float* p, int32_t n) {
  int32_t any = 0;
  for (int32_t i = 0; i < n; ++i) any |= p[i] > 0.0f ? 1 : 0;
  return any != 0;
}

FASER_CLONES
void zero_behind(const float* x, int32_t n, float cut_value, int32_t cut_id, float* weights) {
  for (int32_t i = 0; i < n; ++i) {
    const bool keep = (x[i] > cut_value) | ((x[i] == cut_value) & (i <= cut_id));
    weights[i] = keep ? weights[i] : 0.0f;
  }
}

FASER_CLONES
void zero_below(int32_t n, float floor, float* weights) {
  for (int32_t i = 0; i < n; ++i) weights[i] = weights[i] < floor ? 0.0f : weights[i];
}

FASER_CLONES
double row_sum(const float* x, int32_t n) {
  double lanes[kSumLanes] = {};
  int32_t start = 0;
  for (; start + kSumLanes <= n; start += kSumLanes) {
    for (int32_t i = 0; i < kSumLanes; ++i) lanes[i] += static_cast<double>(x[start + i]);
  }
  for (int32_t i = start; i < n; ++i) lanes[i - start] += static_cast<double>(x[i]);
  for (int32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (int32_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

FASER_CLONES
void scale_row(float factor, int32_t n, float* x) {
  for (int32_t i = 0; i < n; ++i) x[i] *= factor;
}

FASER_CLONES
void residual_row(const float* p, const float* q, int32_t n, float* out) {
  for (int32_t i = 0; i < n; ++i) {
    const float difference = p[i] - q[i];
    out[i] = difference > 0.0f ? difference : 0.0f;
  }
}

}  // namespace faser
