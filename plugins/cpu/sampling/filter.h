// Top-k and top-p: the choice of the tokens of a row that remain.
#ifndef FASER_FILTER_H_
#define FASER_FILTER_H_

#include <cstdint>

#include "row_kernels.h"

namespace faser {

// Zeroes the weights of tokens after the top_k best (0: off), then after the smallest set that has top_p of the rest
// (1: off). Tokens rank by (logit descending, id ascending). weights: exp_row of the logits.
void filter_top(const LogitsRow& row, int32_t top_k, float top_p, float* weights);

}  // namespace faser

#endif  // FASER_FILTER_H_
