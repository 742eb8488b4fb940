// The Gumbel-max draw alone, from weights given bit by bit, which logits cannot produce.
#include "sampling/draw.cuh"

// tokens [3]: without and with the question for the lead, and the runner-up.
extern "C" __global__ void gumbel_max(const float* p, int32_t n, uint64_t key, uint64_t position, int32_t* tokens,
                                      double* lead) {
  const auto weight = [&](int32_t token) { return p[token]; };
  double found = -1.0;
  const int32_t plain = faser::gumbel_max_token<false>(n, key, position, weight);
  int32_t runner_up = -2;
  const int32_t token = faser::gumbel_max_token<true>(n, key, position, weight, &found, &runner_up);
  if (threadIdx.x == 0) {
    tokens[0] = plain;
    tokens[1] = token;
    tokens[2] = runner_up;
    *lead = found;
  }
}
