// Rejection sampling: every running row verifies the draft that follows it, or draws a token if there is none.
//
// All rows are decided first and in parallel, since a row's verdict depends only on its own distribution, its draft and
// the noise of its position. For small vocabularies accept_rows_* runs a block per row. For larger ones several blocks
// process a row in stages; each stage is a launch, and the later ones read only the rows that need them. Then accept
// runs one thread per request, which goes through its rows up to the first that does not accept, so rows after a
// rejection are ignored. An unseeded draft of the draft model is tested against the q that it was drawn from; a draft
// found in the text was not drawn, so it is compared with the target's own draw.
//
// limits of accept_rows_*: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
// limits of accept_whole_*: registers <= 128, spill_bytes <= 0, shared_bytes <= 16384
// limits: registers <= 64, spill_bytes <= 128, shared_bytes <= 16384
#include "sampling/accept_parts.cuh"
#include "sampling/verdict.cuh"

namespace faser {

template <typename T>
__device__ void accept_row(const AcceptRows<T>& a) {
  __shared__ RowShared shared;
  const int32_t row = blockIdx.x;
  int32_t slot, position;
  bool has_draft;
  if (!a.find(row, &slot, &position, &has_draft)) return;
  Verdict verdict = {kRowRefused, -1, 0};
  if (slot >= 0) {
    const Sampling& s = a.sampling[slot];
    verdict.status = a.edit(s, row, position, 0, a.vocab_size);
    if (verdict.status == kRowOk) {
      verdict = judge(s, a.entries(row, has_edits(s, position)), position, has_draft, a.max_draft_len, &shared);
    }
  }
  a.write(row, verdict);
}

// A stage for the rows of a larger vocabulary.
template <Stage kStage, typename T>
__device__ void accept_parts(const AcceptRows<T>& a, void* memory) {
  __shared__ PartsShared shared;
  AcceptParts<T> parts = {a, Workspace(memory, a.vocab_size), &shared};
  if constexpr (kStage == kScan) {
    if (blockIdx.x == 0 && blockIdx.y == 0) parts.workspace.begin();
    parts.scan(blockIdx.y, blockIdx.x);
  } else {
    parts.workspace.template for_each_listed<kStage>([&](int32_t row, int32_t part) {
      if constexpr (kStage == kWeigh) parts.weigh(row, part);
      if constexpr (kStage == kRank) parts.rank(row, part);
      if constexpr (kStage == kDraw) parts.draw(row, part);
      if constexpr (kStage == kWhole) parts.whole(row);
    });
  }
}

}  // namespace faser

// sampling: [num_slots] entries of 160 bytes (sampling.cuh). logits: row r begins at r * logits_stride. edited_logits:
// scratch fp32 [num_rows, vocab_size], or null if no slot edits its logits. verdicts: int32 [num_rows, 3].
#define FASER_ACCEPT_ARGUMENTS(T)                                                                                      \
  const faser::Sampling *sampling, const int32_t *slots, const T *logits, const int32_t *cu_logit_rows,                \
      const int32_t *num_tokens, const int32_t *num_drafts, int32_t num_slots, int32_t num_requests, int32_t num_rows, \
      int32_t vocab_size, int32_t logits_stride, int32_t max_draft_len
#define FASER_ACCEPT_ROWS(T)                                                                                       \
  faser::AcceptRows<T> {                                                                                           \
    sampling, slots, logits, cu_logit_rows, num_tokens, num_drafts, num_slots, num_requests, num_rows, vocab_size, \
        logits_stride, max_draft_len, edited_logits, verdicts                                                      \
  }

// accept_rows_*: grid (num_rows). The stages are launched one after the other: accept_scan_* with grid (parts of a row,
// num_rows), the others with any number of blocks. workspace (parts.cuh): memory for num_rows rows.
#define FASER_ACCEPT_STAGE(STAGE, NAME, T, BLOCKS)                                                \
  extern "C" __global__ void __launch_bounds__(faser::kThreads, BLOCKS)                           \
      NAME(FASER_ACCEPT_ARGUMENTS(T), float* edited_logits, void* workspace, int32_t* verdicts) { \
    faser::accept_parts<faser::STAGE>(FASER_ACCEPT_ROWS(T), workspace);                           \
  }
#define FASER_ACCEPT(NAME, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(faser::kThreads, 1)                             \
      accept_rows_##NAME(FASER_ACCEPT_ARGUMENTS(T), float* edited_logits, int32_t* verdicts) { \
    faser::accept_row(FASER_ACCEPT_ROWS(T));                                                   \
  }                                                                                            \
  FASER_ACCEPT_STAGE(kScan, accept_scan_##NAME, T, 2)                                          \
  FASER_ACCEPT_STAGE(kWeigh, accept_weigh_##NAME, T, 2)                                        \
  FASER_ACCEPT_STAGE(kRank, accept_rank_##NAME, T, 2)                                          \
  FASER_ACCEPT_STAGE(kDraw, accept_draw_##NAME, T, 2)                                          \
  FASER_ACCEPT_STAGE(kWhole, accept_whole_##NAME, T, 1)
FASER_ACCEPT(fp32, float)
FASER_ACCEPT(bf16, faser::bf16)
FASER_ACCEPT(fp16, faser::fp16)

// token_ids [num_requests, max_draft_len + 1], zero after the first num_committed; the others [num_requests].
extern "C" __global__ void accept(const faser::Sampling* sampling, const int32_t* slots, const int32_t* cu_logit_rows,
                                  const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* verdicts,
                                  int32_t num_slots, int32_t num_requests, int32_t num_rows, int32_t max_draft_len,
                                  int32_t* token_ids, int32_t* num_committed, int32_t* num_accepted, int32_t* outcome,
                                  int32_t* row_status) {
  const int32_t request = blockIdx.x * blockDim.x + threadIdx.x;
  if (request >= num_requests) return;
  const int32_t begin = cu_logit_rows[request], end = cu_logit_rows[request + 1];
  int32_t* tokens = token_ids + static_cast<int64_t>(request) * (max_draft_len + 1);
  int32_t committed = 0, accepted = 0, how = faser::kStillPending, status = faser::kRowOk;
  if (begin < 0 || end > num_rows ||
      !faser::is_valid(sampling, num_slots, slots[request], end - begin, num_tokens[request], num_drafts[request],
                       max_draft_len)) {
    how = faser::kFailed;
    status = faser::kRowRefused;
  }
  for (int32_t row = begin; how == faser::kStillPending && row < end; ++row) {
    const int32_t* verdict = verdicts + 3 * static_cast<int64_t>(row);
    if (verdict[0] != faser::kRowOk) {
      how = faser::kFailed;
      status = verdict[0];
      break;
    }
    tokens[committed++] = verdict[1];
    if (verdict[2]) {
      ++accepted;
    } else {
      how = row - begin < num_drafts[request] ? faser::kRecovered : faser::kBonus;
    }
  }
  for (int32_t i = committed; i <= max_draft_len; ++i) tokens[i] = 0;
  num_committed[request] = committed;
  num_accepted[request] = accepted;
  outcome[request] = how;
  row_status[request] = status;
}
