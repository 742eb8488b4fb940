// Draws one token from a distribution.
#ifndef FASER_DRAW_H_
#define FASER_DRAW_H_

#include <cstdint>

namespace faser {

// The first index at which the running sum of the weights exceeds u times their total (u in [0, 1)); -1 if the total is
// 0. Its weight is never zero.
int32_t draw_token(const float* weights, int32_t n, double u);

// log_odds: log(second smallest E_v / p_v / smallest), infinite if p has one token: how much log-probability the drawn
// token could lose and still be drawn. runner_up: the token that would then be drawn, -1 for none.
struct GumbelLead {
  double log_odds;
  int32_t runner_up;
};

// A draw from p with the Gumbel-max trick, as an exponential race: argmin over p_v > 0 of E_v / p_v, with
// E_v = -log(U(key, position, v)); the lowest id wins ties. Draws from two distributions with the same (key, position)
// agree as often as is possible without communication.
// lead: NULL, or set.
int32_t gumbel_max_token(const float* p, int32_t n, uint64_t key, uint64_t position, GumbelLead* lead = nullptr);

}  // namespace faser

#endif  // FASER_DRAW_H_
