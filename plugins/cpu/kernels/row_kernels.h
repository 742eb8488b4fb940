// Loops over one row of logits or probabilities. Results are bitwise equal on every instruction set: sums have a fixed
// order, and nothing is contracted.
#ifndef FASER_ROW_KERNELS_H_
#define FASER_ROW_KERNELS_H_

#include <cstdint>

namespace faser {

// Finds the maximum of a row; false if the row has a NaN or +inf (max undefined). -inf entries are allowed.
bool row_max(const float* x, int32_t n, float* max);

// The same, with the second largest entry: max again if it occurs twice, -inf if n is 1.
bool row_top2(const float* x, int32_t n, float* max, float* second);

// Finds the `count` largest entries above -inf in the order (x descending, index ascending), padded with -1. No NaN in
// x.
void top_ids(const float* x, int32_t n, int32_t count, int32_t* ids);

// Returns the first index whose entry equals value; n if there is none.
int32_t first_index_of(const float* x, int32_t n, float value);

// A row of logits for a softmax. Depth: (max - x) * inv_temperature, in nats.
struct LogitsRow {
  const float* x;
  int32_t size;
  float max;
  float inv_temperature;
};

constexpr float kMaxDepth = 72.0f;

// out = exp(-depth), exactly 1 at the maximum, 0 below kMaxDepth.
void exp_row(const LogitsRow& row, float* out);

// Counts the entries at most `depth` deep, and sums their weights.
int32_t count_within(const LogitsRow& row, float depth, const float* weights, double* mass);

// Returns their indices, ascending.
void collect_within(const LogitsRow& row, float depth, int32_t* ids);

// Zeroes weights of entries ranked after (cut_value, cut_id) in the order (x descending, id ascending).
void zero_behind(const float* x, int32_t n, float cut_value, int32_t cut_id, float* weights);

// Zeroes weights below floor.
void zero_below(int32_t n, float floor, float* weights);

double row_sum(const float* x, int32_t n);

void scale_row(float factor, int32_t n, float* x);

// out = max(p - q, 0).
void residual_row(const float* p, const float* q, int32_t n, float* out);

bool any_positive(const float* p, int32_t n);

// True if any token with p > 0 has words * 2^-32 below bound * p, up to rounding (a bound 1e-6 too large misses
// none).
bool any_candidate(const float* p, const uint32_t* words, int32_t n, float bound);

}  // namespace faser

#endif  // FASER_ROW_KERNELS_H_
