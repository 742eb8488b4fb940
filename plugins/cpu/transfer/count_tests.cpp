// Counts drafts that were verified on another device, by source; ops/transfer/count_tests.py computes the same.
#include <cstdint>

#include "acceptance.h"
#include "faser_cpu.h"

int32_t faser_count_tests(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_accepted, const int32_t* outcome) {
  for (int32_t i = 0; i < num_requests; ++i) {
    faser_sampling& s = sampling[slots[i]];
    const int32_t num_tested = num_accepted[i] + (outcome[i] == FASER_RECOVERED ? 1 : 0);
    if (num_tokens[i] < 0 || num_accepted[i] < 0) return FASER_BAD_ARGUMENT;
    for (int32_t j = 0; j < num_tested; ++j) {
      const int32_t source = faser::is_certain(s, num_tokens[i] + j) ? FASER_BY_SUFFIX : FASER_BY_MODEL;
      ++s.num_tested[source];
      s.num_passed[source] += j < num_accepted[i] ? 1 : 0;
    }
  }
  return FASER_OK;
}
