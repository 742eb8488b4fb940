// The acceptance probability of a pending draft.
#ifndef FASER_ACCEPTANCE_H_
#define FASER_ACCEPTANCE_H_

#include <cstdint>

#include "faser_cpu.h"
#include "sigmoid.h"

namespace faser {

constexpr int32_t kNumModes = 3;

inline double capped_margin(const faser_acceptance& a, float margin) {
  return static_cast<double>(margin) < a.max_margin ? static_cast<double>(margin) : a.max_margin;
}

inline double acceptance_of(const faser_acceptance& a, int32_t mode, int32_t place, double margin) {
  const int32_t at = mode * a.stride + place;
  return sigmoid(static_cast<double>(a.slope[at]) * margin + static_cast<double>(a.intercept[at]));
}

// True if the draft's margin already is its log-odds of acceptance, as of a drafter that draws nothing.
inline bool is_certain(const faser_sampling& s, int32_t position) {
  return s.draft_sources != nullptr && s.draft_sources[position] != FASER_BY_MODEL;
}

}  // namespace faser

#endif  // FASER_ACCEPTANCE_H_
