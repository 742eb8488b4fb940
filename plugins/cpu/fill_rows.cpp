// Fills the rows of a batch from its requests' tokens; ops/requests/fill_rows.py computes the same.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "faser_cpu.h"

int32_t faser_fill_rows(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                        const int32_t* first, const int32_t* end, const int32_t* num_logit_rows, int32_t max_num_rows,
                        int32_t* cu_rows, int32_t* token_ids, int32_t* positions, int32_t* logit_rows,
                        int32_t* out_num_logit_rows) {
  int32_t num_rows = 0, num_logits = 0;
  cu_rows[0] = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t* tokens = sampling[slots[i]].tokens;
    const int32_t count = end[i] - first[i];
    if (first[i] < 0 || count < 1 || count > max_num_rows - num_rows || tokens == nullptr) return FASER_BAD_ARGUMENT;
    if (num_logit_rows[i] < 0 || num_logit_rows[i] > count) return FASER_BAD_ARGUMENT;
    std::memcpy(token_ids + num_rows, tokens + first[i], sizeof(int32_t) * static_cast<size_t>(count));
    for (int32_t j = 0; j < count; ++j) positions[num_rows + j] = first[i] + j;
    num_rows += count;
    for (int32_t j = num_logit_rows[i]; j > 0; --j) logit_rows[num_logits++] = num_rows - j;
    cu_rows[i + 1] = num_rows;
  }
  *out_num_logit_rows = num_logits;
  return num_rows;
}
