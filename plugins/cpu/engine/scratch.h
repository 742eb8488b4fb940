// Per-thread rows of probabilities, kept between calls.
#ifndef FASER_SCRATCH_H_
#define FASER_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace faser {

template <int kRow>
inline float* row_scratch(int32_t vocab_size) {
  thread_local std::vector<float> row;
  if (row.size() < static_cast<size_t>(vocab_size)) row.resize(static_cast<size_t>(vocab_size));
  return row.data();
}

inline float* probs_scratch(int32_t vocab_size) { return row_scratch<0>(vocab_size); }
inline float* residual_scratch(int32_t vocab_size) { return row_scratch<1>(vocab_size); }

}  // namespace faser

#endif  // FASER_SCRATCH_H_
