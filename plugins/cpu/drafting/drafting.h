// The requests of a draft call that still draft, and the rule by which each continues.
#ifndef FASER_DRAFTING_H_
#define FASER_DRAFTING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"
#include "sigmoid.h"

namespace faser {

// ops/draft_stop.py computes the same, operation by operation.
inline double acceptance(const faser_draft_stop& stop, int32_t mode, int32_t place, float margin) {
  const int32_t at = mode * stop.stride + place;
  return sigmoid(static_cast<double>(stop.slope[at]) * static_cast<double>(margin) +
                 static_cast<double>(stop.intercept[at]));
}

inline double pending_survival(const faser_draft_stop& stop, const faser_sampling& s, int32_t num_tokens,
                               int32_t num_drafts) {
  double survival = 1.0;
  for (int32_t j = 0; j < num_drafts; ++j) {
    const float margin = s.draft_margins[num_tokens + j];
    survival *=
        is_certain(s, num_tokens + j) ? sigmoid(static_cast<double>(margin)) : acceptance(stop, s.mode, j, margin);
  }
  return survival;
}

// Buffers of the calling thread, which only grow. Columns have the requests that still draft, in the same order.
struct Drafting {
  std::vector<int32_t> requests;  // indices into the caller's batch
  std::vector<int32_t> slots, token_ids, positions, num_known;
  std::vector<int32_t> rows;     // in the first pass
  std::vector<double> survival;  // for the request's pending drafts
  std::vector<float*> logits;    // for a block drafter: the row of the next draft
  std::vector<int32_t> cu_rows;  // 0, 1, 2 .., for one row each

  void reserve(int32_t num_requests) {
    const size_t size = static_cast<size_t>(num_requests);
    if (requests.size() >= size) return;
    for (std::vector<int32_t>* buffer : {&requests, &slots, &token_ids, &positions, &rows, &num_known})
      buffer->resize(size);
    survival.resize(size);
    logits.resize(size);
    cu_rows.resize(size + 1);
    for (size_t i = 0; i <= size; ++i) cu_rows[i] = static_cast<int32_t>(i);
  }

  // After a draft of requests first .. end - 1: counts them, keeps those that continue and returns their end. None
  // continues if a step for them would cost more than it is worth.
  int32_t go_on(int32_t first, int32_t end, const faser_draft_stop* stop, const faser_sampling* sampling,
                const int32_t* num_drafts, const int32_t* num_new_drafts, int32_t* out_num_new) {
    int32_t kept = first;
    double gain = 0.0;  // expected tokens of the next step minus the cost of its rows
    for (int32_t a = first; a < end; ++a) {
      const int32_t i = requests[a];
      if (token_ids[a] < 0 || ++out_num_new[i] == num_new_drafts[i]) continue;
      if (stop != nullptr) {
        const int32_t place = num_drafts[i] + out_num_new[i] - 1;
        const faser_sampling& s = sampling[slots[a]];
        const float margin = s.draft_margins[num_known[a]];
        const double so_far = survival[a] * acceptance(*stop, s.mode, place, margin);
        const int32_t next = s.mode * stop->stride + place + 1;
        const double prior = static_cast<double>(stop->prior[next]), spread = static_cast<double>(stop->spread[next]);
        const double row_price = static_cast<double>(stop->row_price[place + 1]);
        const double high = so_far * (prior + spread) - row_price, low = so_far * (prior - spread) - row_price;
        if (high < 0.0) continue;
        survival[kept] = so_far;
        gain += 0.5 * (high + std::max(low, 0.0));
      }
      requests[kept] = i;
      slots[kept] = slots[a];
      token_ids[kept] = token_ids[a];
      positions[kept] = num_known[a];
      num_known[kept] = num_known[a] + 1;
      logits[kept] = logits[a];
      ++kept;
    }
    if (stop != nullptr && gain < static_cast<double>(stop->step_price[kept - first])) return first;
    return kept;
  }
};

}  // namespace faser

#endif  // FASER_DRAFTING_H_
