// Drafting by blocks: one pass yields the distributions of all drafts, which are then drawn position by position.
#include "draft_block.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "sample.h"

namespace faser {
namespace {

// Columns of the calling thread's batch, which only grow.
struct BlockScratch {
  std::vector<int32_t> cu_rows, token_ids, positions;  // of the context
  std::vector<int32_t> num_places, num_new, num_pending;
};

// Copies the batch's rows except those of the last committed tokens of drafting requests.
int32_t run_context(faser_engine* engine, const faser_batch& batch, const int32_t* num_new_drafts,
                    BlockScratch& scratch) {
  scratch.cu_rows.assign(1, 0);
  scratch.token_ids.clear();
  scratch.positions.clear();
  for (int32_t i = 0; i < batch.num_requests; ++i) {
    const int32_t end = batch.cu_rows[i + 1] - (num_new_drafts[i] > 0 ? 1 : 0);
    scratch.token_ids.insert(scratch.token_ids.end(), batch.token_ids + batch.cu_rows[i], batch.token_ids + end);
    scratch.positions.insert(scratch.positions.end(), batch.positions + batch.cu_rows[i], batch.positions + end);
    scratch.cu_rows.push_back(static_cast<int32_t>(scratch.token_ids.size()));
  }
  faser_batch context = batch;
  context.num_rows = scratch.cu_rows.back();
  context.cu_rows = scratch.cu_rows.data();
  context.token_ids = scratch.token_ids.data();
  context.positions = scratch.positions.data();
  return engine->forward(context, 0, engine->num_layers(), nullptr, 0, nullptr);
}

}  // namespace

int32_t draft_block(faser_engine* engine, faser_pool* pool, const faser_batch& batch, faser_sampling* sampling,
                    int32_t num_active, const int32_t* num_new_drafts, int32_t max_draft_len,
                    const faser_draft_stop* stop, Drafting& drafting, float* logits, int32_t* out_num_new) {
  thread_local BlockScratch scratch;
  int32_t status = run_context(engine, batch, num_new_drafts, scratch);
  const size_t num_requests = static_cast<size_t>(batch.num_requests), stride = engine->logits_stride();
  scratch.num_places.resize(num_requests);
  scratch.num_new.assign(num_new_drafts, num_new_drafts + num_requests);
  scratch.num_pending.assign(num_requests, 0);
  for (int32_t& num_new : scratch.num_new) num_new = std::min(num_new, engine->num_places());
  for (int32_t first = 0; first < num_active && status == FASER_OK; first += engine->max_blocks_of_pass()) {
    int32_t end = std::min(num_active, first + engine->max_blocks_of_pass());
    float* row = logits;
    for (int32_t a = first; a < end; ++a) {
      const int32_t i = drafting.requests[a];
      drafting.positions[a] = drafting.num_known[a] - 1;
      drafting.token_ids[a] = batch.token_ids[batch.cu_rows[i + 1] - 1];
      drafting.logits[a] = row;
      scratch.num_places[a] = scratch.num_new[i];
      row += static_cast<size_t>(scratch.num_new[i]) * stride;
    }
    const BlockRows rows = {drafting.slots.data() + first, drafting.token_ids.data() + first,
                            drafting.positions.data() + first, scratch.num_places.data() + first, end - first};
    status = engine->draft_blocks(batch, rows, logits);
    while (status == FASER_OK && end > first) {
      engine->add_previous(end - first, drafting.token_ids.data() + first, logits, drafting.logits.data() + first);
      status = sample_drafts(pool, end - first, drafting.slots.data() + first, sampling, drafting.logits.data() + first,
                             engine->vocab_size(), drafting.num_known.data() + first, max_draft_len,
                             drafting.token_ids.data() + first);
      if (status != FASER_OK) break;
      end = drafting.go_on(first, end, stop, sampling, scratch.num_pending.data(), scratch.num_new.data(), out_num_new);
      for (int32_t a = first; a < end; ++a) drafting.logits[a] += stride;
    }
  }
  return status;
}

}  // namespace faser
