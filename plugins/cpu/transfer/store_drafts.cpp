// Writes drafts that were made on another device to their requests' memory; ops/transfer/store_drafts.py is the same.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "faser_cpu.h"

int32_t faser_store_drafts(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_known, int32_t num_steps, int32_t stride, const int32_t* tokens,
                           const float* margins, const int32_t* candidates, const int32_t* runners_up,
                           int32_t* out_num_new) {
  if (num_requests < 0 || num_requests > stride || num_steps < 0) return FASER_BAD_ARGUMENT;
  for (int32_t i = 0; i < num_requests; ++i) {
    faser_sampling& s = sampling[slots[i]];
    if (s.tokens == nullptr || num_known[i] <= 0) return FASER_BAD_ARGUMENT;
    int32_t step = 0;
    for (; step < num_steps; ++step) {
      const size_t from = static_cast<size_t>(step) * static_cast<size_t>(stride) + static_cast<size_t>(i);
      if (tokens[from] < 0) break;
      const size_t position = static_cast<size_t>(num_known[i] + step);
      s.tokens[position] = tokens[from];
      if (s.draft_margins != nullptr) s.draft_margins[position] = margins[from];
      if (s.draft_sources != nullptr) s.draft_sources[position] = FASER_BY_MODEL;
      if (s.draft_runners_up != nullptr) s.draft_runners_up[position] = runners_up == nullptr ? -1 : runners_up[from];
      if (s.draft_candidates != nullptr) {
        std::memcpy(s.draft_candidates + position * FASER_NUM_CANDIDATES, candidates + from * FASER_NUM_CANDIDATES,
                    sizeof(int32_t) * FASER_NUM_CANDIDATES);
      }
    }
    out_num_new[i] = step;
    if (s.mode == FASER_SAMPLED) s.draft_counter += static_cast<uint64_t>(step);
  }
  return FASER_OK;
}
