// The distribution of the next token: logits with all edits applied, as probabilities or as the argmax.
#ifndef FASER_PROBS_H_
#define FASER_PROBS_H_

#include <cstdint>

#include "faser_cpu.h"

namespace faser {

// Finds the argmax of the edited logits, the lowest id on ties. Returns a faser_row_status; token is set if it is OK.
int32_t greedy_token(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                     int32_t* token);

// A row of logits after the edits, before temperature.
struct EditedRow {
  const float* x;  // [vocab_size]; valid until the thread edits another row
  float max;
  float second;  // the second largest entry (max itself if it occurs twice); only on request
};

// Edits the logits of the token after the first num_tokens tokens. Returns a faser_row_status; row is set if it is OK.
int32_t edited_row(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                   bool wants_second, EditedRow* row);

// Computes faser_next_token_probs from an edited row.
void probs_of_row(const faser_sampling& sampling, const EditedRow& row, int32_t vocab_size, float* probs);

// Computes faser_next_token_probs.
int32_t next_token_probs(const faser_sampling& sampling, const float* logits, int32_t vocab_size, int32_t num_tokens,
                         float* probs);

}  // namespace faser

#endif  // FASER_PROBS_H_
