// The rows of a draft model's first pass; ops/requests/draft_rows.py computes the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "faser_cpu.h"

int32_t faser_draft_rows(int32_t num_requests, const int32_t* slots, const int32_t* num_tokens,
                         const int32_t* num_computed, const int32_t* num_draft_computed, const int32_t* num_pending,
                         const int32_t* drafters, const int32_t* num_new_tokens, const int32_t* max_drafts,
                         int32_t is_head, int32_t max_num_rows, int32_t* out) {
  const ptrdiff_t stride = num_requests;
  int32_t num_found = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    if ((drafters[i] & (1 << FASER_BY_MODEL)) == 0) continue;
    int32_t num_new = 0, end;
    if (num_computed[i] == num_tokens[i] - 1) {  // it decodes
      num_new = max_drafts[i] - num_pending[i];
      if (num_new <= 0) continue;
      end = num_tokens[i] + (is_head != 0 ? 0 : num_pending[i]);
    } else {  // a head's rows need the target's hidden rows of the position before
      end = is_head == 0 ? num_computed[i] + num_new_tokens[i] : num_computed[i] > 0 ? num_computed[i] + 1 : 0;
    }
    const int32_t first = num_draft_computed[i];
    if (end - first > max_num_rows) {
      end = first + max_num_rows;
      num_new = 0;
    }
    if (end <= first || (is_head != 0 && end < 2)) continue;  // a head has no hidden row before the first token
    max_num_rows -= end - first;
    const int32_t found[] = {i, slots[i], first, end, num_new > 0 ? 1 : 0, num_tokens[i], num_pending[i], num_new};
    for (int32_t column = 0; column < FASER_NUM_DRAFT_COLUMNS; ++column)
      out[column * stride + num_found] = found[column];
    ++num_found;
  }
  return num_found;
}
