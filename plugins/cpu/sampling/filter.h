// Top-k and top-p: which tokens of a row survive.
#ifndef FASER_FILTER_H_
#define FASER_FILTER_H_

#include <cstdint>

#include "row_kernels.h"

namespace faser {

// Zeroes the weights of tokens behind the top_k best (0: off), then behind the smallest set that holds top_p of what is
// left (1: off). Tokens rank by (logit descending, id ascending). weights: exp_row of the logits.
void filter_top(const LogitsRow& row, int32_t top_k, float top_p, float* weights);

}  // namespace faser

#endif  // FASER_FILTER_H_
