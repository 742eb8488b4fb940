// The logistic function, with the same operations in the same order as in ops/draft_stop.py.
#ifndef FASER_SIGMOID_H_
#define FASER_SIGMOID_H_

#include <cmath>

namespace faser {

inline double sigmoid(double z) {
  if (z >= 0) return 1.0 / (1.0 + std::exp(-z));
  const double e = std::exp(z);
  return e / (1.0 + e);
}

}  // namespace faser

#endif  // FASER_SIGMOID_H_
