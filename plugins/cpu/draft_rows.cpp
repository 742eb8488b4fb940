// Plans the rows of a draft model's first pass; lab/reference/requests/draft_rows.py computes the same.
#include <cstddef>
#include <cstdint>

#include "faser_cpu.h"

int32_t faser_draft_rows(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                         const int32_t* counts, const int32_t* num_pending, const int32_t* num_new_tokens,
                         const int32_t* max_drafts, int32_t kind, int32_t* out, int32_t* out_num_requests,
                         int32_t max_num_rows, int32_t* cu_rows, int32_t* token_ids, int32_t* positions,
                         int32_t* logit_rows, int32_t* out_num_logit_rows) {
  const ptrdiff_t stride = num_requests;
  const bool is_model = kind == FASER_DRAFT_MODEL, is_head = kind == FASER_DRAFT_HEAD;
  int32_t num_found = 0, num_left = max_num_rows;
  for (int32_t i = 0; i < num_requests; ++i) {
    const auto count = [&](faser_count name) { return counts[name * stride + i]; };
    if ((count(FASER_DRAFTERS) & (1 << FASER_BY_MODEL)) == 0) continue;
    const int32_t num_tokens = count(FASER_NUM_TOKENS), num_computed = count(FASER_NUM_COMPUTED);
    int32_t num_new = 0, end = num_computed;  // tokens with the target's KV
    if (num_computed == num_tokens - 1) {     // it decodes
      num_new = max_drafts[i] - num_pending[i];
      if (num_new <= 0 || (kind == FASER_DRAFT_BLOCK && num_pending[i] > 0)) continue;
      end = num_tokens + (is_model ? num_pending[i] : 0);
    } else if (is_head) {  // its rows need the target's hidden rows of the previous position
      end = num_computed > 0 ? num_computed + 1 : 0;
    } else if (is_model) {
      end = num_computed + num_new_tokens[i];
    }
    const int32_t first = count(FASER_NUM_DRAFT_COMPUTED);
    if (end - first > num_left) {
      end = first + num_left;
      num_new = 0;
    }
    if (end <= first || (is_head && end < 2)) continue;  // a head has no hidden row before the first token
    num_left -= end - first;
    const int32_t found[] = {i, slots[i], first, end, num_new > 0 ? 1 : 0, num_tokens, num_pending[i], num_new};
    for (int32_t column = 0; column < FASER_NUM_DRAFT_COLUMNS; ++column)
      out[column * stride + num_found] = found[column];
    ++num_found;
  }
  *out_num_requests = num_found;
  const auto column = [&](faser_draft_column name) { return out + name * stride; };
  return faser_fill_rows(num_found, column(FASER_DRAFT_SLOT), sampling, column(FASER_DRAFT_FIRST),
                         column(FASER_DRAFT_END), column(FASER_DRAFT_LOGITS), max_num_rows, cu_rows, token_ids,
                         positions, logit_rows, out_num_logit_rows);
}
