// The distribution that a row of logits is drawn from, by one block.
#ifndef FASER_CUDA_SAMPLING_DISTRIBUTION_CUH_
#define FASER_CUDA_SAMPLING_DISTRIBUTION_CUH_

#include <cmath>

#include "sampling/draw.cuh"
#include "sampling/filter.cuh"
#include "sampling/sampling.cuh"

namespace faser {

struct RowShared {
  union {
    FilterShared filter;
    DrawShared draw;
  };
};

// The factor that turns weights into probabilities; mass: their sum in fixed point of 2^-shift.
__device__ inline float scale_of(uint64_t mass, int shift) {
  return static_cast<float>(1.0 / ldexp(static_cast<double>(mass), -shift));
}

// The same factor for the kept weights of a row, computed by one block.
template <typename T>
__device__ float scale_of(const Row<T>& row, const RowProbs& probs) {
  const int shift = weight_shift(row.n);
  uint64_t mass = 0;
  for_each_entry(row, [&](int32_t id, float value) { mass += fixed_of(probs.kept_weight(value, id), shift); });
  return scale_of(block_reduce(mass, Sum()), shift);
}

// Fills the fields of probs other than max.
template <typename T>
__device__ void make_probs(const Sampling& s, const Row<T>& row, RowProbs* probs, RowShared* shared) {
  probs->inv_temperature = inverse_temperature(s.temperature);
  probs->floor = 0.0f;
  probs->cut = 0;
  if (s.top_k > 0 && s.top_k < row.n) tighten(row, s.top_k, 1.0f, probs, &shared->filter);
  if (s.top_p < 1.0f) tighten(row, 0, s.top_p, probs, &shared->filter);
  probs->floor = s.floor();  // the largest weight is exactly 1
  probs->scale = scale_of(row, *probs);
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_DISTRIBUTION_CUH_
