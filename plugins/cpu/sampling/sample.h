// Draws draft tokens.
#ifndef FASER_SAMPLE_H_
#define FASER_SAMPLE_H_

#include <cstdint>

#include "faser_cpu.h"

namespace faser {

// Draws the token after sampling->tokens[0 .. num_known - 1], appends it and keeps its q if the mode needs it.
// Returns the token, or -1 if the row has no usable distribution (nothing is written then).
int32_t sample_draft(faser_sampling* sampling, const float* logits, int32_t vocab_size, int32_t num_known,
                     int32_t max_draft_len);

// The same for num_requests requests, each with its row of logits. Returns a faser_status.
int32_t sample_drafts(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                      const float* const* logits, int32_t vocab_size, const int32_t* num_known, int32_t max_draft_len,
                      int32_t* out_tokens);

}  // namespace faser

#endif  // FASER_SAMPLE_H_
