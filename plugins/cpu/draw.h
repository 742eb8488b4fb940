// Drawing one token from a law.
#ifndef FASER_DRAW_H_
#define FASER_DRAW_H_

#include <cstdint>

namespace faser {

// The first index at which the running sum of the weights exceeds u times their total (u in [0, 1)); -1 if the total is
// 0. Its weight is never zero.
int32_t draw_token(const float* weights, int32_t n, double u);

// The exponential race: argmin over p_v > 0 of E_v / p_v, E_v = -log(U(key, position, v)), the lowest id on ties; its
// law is p. Two laws that race with the same (key, position) agree as often as they can without knowing each other.
// lead: NULL, or set to log(time of the second / time of the winner), infinite if no other token runs: how much the
// winner's log-probability could lose against all others without losing the race.
int32_t race_token(const float* p, int32_t n, uint64_t key, uint64_t position, double* lead = nullptr);

}  // namespace faser

#endif  // FASER_DRAW_H_
