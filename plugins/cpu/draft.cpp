// Drafting in one call: catch-up rows, then one row per request and step, without returning to the caller.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "draft_block.h"
#include "drafting.h"
#include "engine.h"
#include "faser_cpu.h"

namespace faser {
namespace {

// num_run: number of known tokens that the request's rows reach.
int32_t check_request(const faser_batch& batch, int32_t i, int32_t num_run, int32_t num_drafts, int32_t num_new,
                      int32_t max_draft_len) {
  if (num_new < 0 || num_drafts < 0 || num_drafts + num_new > max_draft_len) return FASER_BAD_ARGUMENT;
  if (num_new == 0) return FASER_OK;
  const int32_t begin = batch.cu_rows[i], end = batch.cu_rows[i + 1];
  if (begin >= end || end > batch.num_rows) return FASER_BAD_ARGUMENT;
  return batch.positions[end - 1] == num_run - 1 ? FASER_OK : FASER_BAD_POSITION;
}

// One row per listed request, after its known tokens; a head continues from its own outputs.
int32_t step(faser_engine* engine, const faser_batch& batch, const Drafting& scratch, int32_t first, int32_t count,
             bool has_logits, float* logits) {
  const faser_batch rows = {count,
                            count,
                            batch.max_blocks_per_seq,
                            scratch.slots.data() + first,
                            scratch.cu_rows.data(),
                            scratch.token_ids.data() + first,
                            scratch.positions.data() + first,
                            batch.block_table,
                            nullptr,
                            0};
  const HeadRows kept = {scratch.cu_rows.data(), scratch.requests.data() + first, count, true};
  // Every row has logits, so their indices are the cumulative rows.
  return engine->forward(rows, 0, engine->num_layers(), scratch.cu_rows.data(), has_logits ? count : 0, logits,
                         engine->is_head() ? &kept : nullptr);
}

// Runs the batch's rows, then a head's pending drafts, one step per position. In the list of drafting requests, those
// without pending drafts come first, then by ascending number, so that all finish together.
int32_t catch_up(faser_engine* engine, const faser_batch& batch, const faser_sampling* sampling,
                 const int32_t* num_drafts, int32_t num_active, Drafting& scratch, float* logits) {
  const int32_t num_layers = engine->num_layers();
  if (!engine->is_head()) return engine->forward(batch, 0, num_layers, scratch.rows.data(), num_active, logits);
  int32_t num_ready = 0;
  while (num_ready < num_active && num_drafts[scratch.requests[num_ready]] == 0) ++num_ready;
  const HeadRows kept = {scratch.rows.data(), scratch.requests.data(), num_active, false};
  int32_t status = engine->forward(batch, 0, num_layers, scratch.rows.data(), num_ready, logits, &kept);
  if (num_ready == num_active) return status;
  float* const step_logits = logits + static_cast<size_t>(num_ready) * static_cast<size_t>(engine->logits_stride());
  for (int32_t left = num_drafts[scratch.requests[num_active - 1]]; left > 0 && status == FASER_OK; --left) {
    int32_t first = num_ready;
    while (num_drafts[scratch.requests[first]] < left) ++first;
    for (int32_t a = first; a < num_active; ++a) {
      scratch.positions[a] = scratch.num_known[a] - left;
      scratch.token_ids[a] = sampling[scratch.slots[a]].tokens[scratch.positions[a]];
    }
    status = step(engine, batch, scratch, first, num_active - first, left == 1, step_logits);
  }
  return status;
}

}  // namespace
}  // namespace faser

int32_t faser_pending_survival(const faser_draft_stop* stop, int32_t num_requests, const int32_t* slots,
                               const faser_sampling* sampling, const int32_t* num_tokens, const int32_t* num_drafts,
                               double* out_survival) {
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    if (num_tokens[i] < 0 || num_drafts[i] > stop->stride) return FASER_BAD_ARGUMENT;
    if (num_drafts[i] > 0 && s.draft_margins == nullptr) return FASER_BAD_ARGUMENT;
    out_survival[i] = faser::pending_survival(*stop, s, num_tokens[i], num_drafts[i]);
  }
  return FASER_OK;
}

int32_t faser_draft(faser_engine* engine, faser_pool* pool, const faser_batch* batch, faser_sampling* sampling,
                    const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                    int32_t max_draft_len, const faser_draft_stop* stop, float* logits, int32_t* out_num_new) {
  thread_local faser::Drafting scratch;
  scratch.reserve(batch->num_requests);
  int32_t num_active = 0;
  for (int32_t i = 0; i < batch->num_requests; ++i) {
    const int32_t num_known = num_tokens[i] + num_drafts[i];
    const int32_t num_run = engine->is_head() ? num_tokens[i] : num_known;
    const int32_t status = faser::check_request(*batch, i, num_run, num_drafts[i], num_new_drafts[i], max_draft_len);
    if (status != FASER_OK) return status;
    if (engine->is_block() && num_new_drafts[i] > 0 && num_drafts[i] > 0) return FASER_BAD_ARGUMENT;
    out_num_new[i] = 0;
    if (num_new_drafts[i] != 0) scratch.requests[num_active++] = i;
  }
  if (engine->is_head()) {
    const auto has_fewer = [&](int32_t i, int32_t j) {
      return num_drafts[i] != num_drafts[j] ? num_drafts[i] < num_drafts[j] : i < j;
    };
    std::sort(scratch.requests.begin(), scratch.requests.begin() + num_active, has_fewer);
  }
  for (int32_t a = 0; a < num_active; ++a) {
    const int32_t i = scratch.requests[a];
    scratch.slots[a] = batch->slots[i];
    scratch.rows[a] = batch->cu_rows[i + 1] - 1;
    scratch.num_known[a] = num_tokens[i] + num_drafts[i];
    if (stop != nullptr) {
      const faser_sampling& s = sampling[batch->slots[i]];
      if (s.draft_margins == nullptr) return FASER_BAD_ARGUMENT;
      scratch.survival[a] = faser::pending_survival(*stop, s, num_tokens[i], num_drafts[i]);
    }
  }
  if (batch->num_rows == 0) return FASER_OK;
  if (engine->is_block())
    return faser::draft_block(engine, pool, *batch, sampling, num_active, num_new_drafts, max_draft_len, stop, scratch,
                              logits, out_num_new);

  const int32_t vocab_size = engine->vocab_size();
  const int32_t stride = faser_engine_logits_stride(engine);
  int32_t status = faser::catch_up(engine, *batch, sampling, num_drafts, num_active, scratch, logits);
  while (status == FASER_OK && num_active > 0) {
    status = faser_sample_draft(pool, num_active, scratch.slots.data(), sampling, logits, stride, vocab_size,
                                scratch.num_known.data(), max_draft_len, scratch.token_ids.data());
    if (status != FASER_OK) break;
    num_active = scratch.go_on(0, num_active, stop, sampling, num_drafts, num_new_drafts, out_num_new);
    if (num_active == 0) break;
    status = faser::step(engine, *batch, scratch, 0, num_active, true, logits);
  }
  return status;
}
