// The race alone, of weights as they are: the weights of a law cannot be chosen bit by bit.
#include "draw.cuh"

// tokens [2]: without and with the question for the lead.
extern "C" __global__ void race(const float* p, int32_t n, uint64_t key, uint64_t position, int32_t* tokens,
                                double* lead) {
  const auto weight = [&](int32_t token) { return p[token]; };
  double found = -1.0;
  const int32_t plain = faser::race_token<false>(n, key, position, weight);
  const int32_t token = faser::race_token<true>(n, key, position, weight, &found);
  if (threadIdx.x == 0) {
    tokens[0] = plain;
    tokens[1] = token;
    *lead = found;
  }
}
