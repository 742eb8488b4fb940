// A request's logit edits before temperature: penalties, bias, bad words, min_tokens, the mask of its guide.
#ifndef FASER_CUDA_SAMPLING_EDIT_CUH_
#define FASER_CUDA_SAMPLING_EDIT_CUH_

#include <cmath>

#include "block.cuh"
#include "sampling/probs.cuh"
#include "sampling/sampling.cuh"

namespace faser {

__host__ __device__ inline bool has_penalties(const Sampling& s) {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

__host__ __device__ inline bool bans_end_ids(const Sampling& s, int32_t num_tokens) {
  return s.num_end_ids > 0 && num_tokens - s.prompt_len < s.min_tokens;
}

__host__ __device__ inline bool has_edits(const Sampling& s, int32_t num_tokens) {
  return has_penalties(s) || s.num_bias > 0 || s.num_bad_words > 0 || bans_end_ids(s, num_tokens) || s.masks != nullptr;
}

__host__ __device__ inline bool in_vocabulary(int32_t token, int32_t vocab_size) {
  return token >= 0 && token < vocab_size;
}

// Edited finite logits stay finite; a logit of -inf stays -inf.
__host__ __device__ inline float clamp_edit(float before, float after) {
  return before == -INFINITY ? before : fminf(fmaxf(after, -kLargest), kLargest);
}

__host__ __device__ inline float penalised(const Sampling& s, float before, int32_t count) {
  if (count == 0) return before;
  float after = before > 0.0f ? divide_rn(before, s.repetition_penalty) : multiply_rn(before, s.repetition_penalty);
  after = add_rn(after, -s.presence_penalty);
  after = add_rn(after, -multiply_rn(s.frequency_penalty, static_cast<float>(count)));
  return clamp_edit(before, after);
}

// Returns true if the word's last token is banned after the first num_tokens tokens. last: set to that token.
__host__ __device__ inline bool bans_word(const Sampling& s, int32_t word, int32_t num_tokens, int32_t* last) {
  const int32_t* ids = s.bad_words + s.cu_bad_words[word];
  const int32_t prefix_len = s.cu_bad_words[word + 1] - s.cu_bad_words[word] - 1;
  if (prefix_len < 0 || prefix_len > num_tokens) return false;
  *last = ids[prefix_len];
  for (int32_t i = 0; i < prefix_len; ++i) {
    if (ids[i] != s.tokens[num_tokens - prefix_len + i]) return false;
  }
  return true;
}

__host__ __device__ inline bool is_finite_logit(float x) { return x < INFINITY; }

// Writes edited[begin .. end]: the logits with the request's edits, given its first num_tokens tokens. Both arrays have
// vocab_size entries. Returns false if the logits there hold a NaN or +inf.
template <typename T>
__device__ bool edit_row(const Sampling& s, const T* logits, int32_t begin, int32_t end, int32_t vocab_size,
                         int32_t num_tokens, float* edited) {
  const auto is_here = [&](int32_t token) { return token >= begin && token < end; };
  const int32_t first = begin + static_cast<int32_t>(threadIdx.x);
  // Token counts share the buffer of the edited logits; only this block uses its entries begin .. end.
  bool finite = true;
  if (has_penalties(s)) {
    uint32_t* counts = reinterpret_cast<uint32_t*>(edited);
    for (int32_t v = first; v < end; v += kThreads) counts[v] = 0;
    __syncthreads();
    for (int32_t t = threadIdx.x; t < num_tokens; t += kThreads) {
      if (is_here(s.tokens[t])) atomicAdd(&counts[s.tokens[t]], 1u);
    }
    __syncthreads();
    for (int32_t v = first; v < end; v += kThreads) {
      const float x = to_float(logits[v]);
      finite &= is_finite_logit(x);
      edited[v] = penalised(s, x, static_cast<int32_t>(counts[v]));
    }
  } else {
    for (int32_t v = first; v < end; v += kThreads) {
      edited[v] = to_float(logits[v]);
      finite &= is_finite_logit(edited[v]);
    }
  }
  if (__syncthreads_or(!finite)) return false;

  // A token that is listed twice is edited twice, in order, by the thread of its first entry.
  for (int32_t b = threadIdx.x; b < s.num_bias; b += kThreads) {
    const int32_t token = s.bias_ids[b];
    bool is_first = is_here(token);
    for (int32_t other = 0; is_first && other < b; ++other) is_first = s.bias_ids[other] != token;
    if (!is_first) continue;
    float value = edited[token];
    for (int32_t other = b; other < s.num_bias; ++other) {
      if (s.bias_ids[other] == token) value = clamp_edit(value, add_rn(value, s.bias_values[other]));
    }
    edited[token] = value;
  }
  __syncthreads();

  for (int32_t word = threadIdx.x; word < s.num_bad_words; word += kThreads) {
    int32_t last;
    if (bans_word(s, word, num_tokens, &last) && is_here(last)) edited[last] = -INFINITY;
  }
  if (bans_end_ids(s, num_tokens)) {
    for (int32_t e = threadIdx.x; e < s.num_end_ids; e += kThreads) {
      if (is_here(s.end_ids[e])) edited[s.end_ids[e]] = -INFINITY;
    }
  }
  if (s.masks != nullptr && s.num_mask_rows > 0) {
    __syncthreads();
    const int32_t num_words = ceil_div(vocab_size, 32);
    const uint32_t* mask = s.masks + static_cast<int64_t>(num_tokens % s.num_mask_rows) * num_words;
    for (int32_t v = first; v < end; v += kThreads) {
      if (!(mask[v / 32] >> (v % 32) & 1u)) edited[v] = -INFINITY;
    }
  }
  __syncthreads();
  return true;
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_EDIT_CUH_
