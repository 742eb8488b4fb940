// Sampling parameters of one request: faser_sampling of plugins/cpu/faser_cpu.h, field by field, with device pointers.
#ifndef FASER_CUDA_SAMPLING_SAMPLING_CUH_
#define FASER_CUDA_SAMPLING_SAMPLING_CUH_

#include <cstdint>

namespace faser {

enum SamplingMode : int32_t { kGreedy = 0, kSeeded = 1, kSampled = 2 };

enum RowStatus : int32_t {
  kRowOk = 0,
  kRowNan = 1,      // NaN or +inf in the row
  kRowEmpty = 2,    // every token is banned
  kRowRefused = 3,  // a slot, count, draft token or missing buffer that would have indexed memory wrongly
};

enum Outcome : int32_t { kStillPending = 0, kRecovered = 1, kBonus = 2, kFailed = 3 };

enum DraftSource : int8_t { kByModel = 0, kBySuffix = 1 };

struct Sampling {
  const int32_t* tokens;
  const float* draft_probs;
  float* draft_margins;
  int32_t* draft_candidates;
  const int8_t* draft_sources;  // by position, of pending drafts; null: all are the draft model's
  const int32_t* end_ids;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* bad_words;
  const int32_t* cu_bad_words;
  uint64_t key;
  uint64_t draft_counter;
  int64_t num_tested[2], num_passed[2];  // host only
  int32_t num_end_ids, num_bias, num_bad_words;
  int32_t prompt_len;
  int32_t min_tokens;
  int32_t mode;
  int32_t top_k;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t num_mask_rows;
  const uint32_t* masks;
  const void* fill_masks;           // host only: the host fills masks before it sends them
  const int32_t* draft_runners_up;  // host only

  // The least weight that is kept, as a fraction of the largest.
  __device__ float floor() const { return min_p; }
  __device__ bool has_floor() const { return min_p > 0.0f; }
};

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_SAMPLING_CUH_
