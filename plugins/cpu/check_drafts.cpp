// Checks the tokens that a drafter reports; ops/requests/check_drafts.py computes the same.
#include <cstdint>

#include "faser_cpu.h"

int32_t faser_check_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                           const int32_t* first, const int32_t* num_new, const int32_t* room, int32_t vocab_size) {
  for (int32_t i = 0; i < num_requests; ++i) {
    if (num_new[i] == 0) continue;  // even if more is pending than a step may keep
    if (num_new[i] < 0 || num_new[i] > room[i]) return i;
    const int32_t* tokens = sampling[slots[i]].tokens + first[i];
    for (int32_t j = 0; j < num_new[i]; ++j) {
      if (tokens[j] < 0 || tokens[j] >= vocab_size) return i;
    }
  }
  return num_requests;
}
