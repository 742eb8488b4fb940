// Drops rows between two segments and updates the ragged arrays.
//
// One launch, one block per kept row. Every output depends on the inputs alone (two binary searches), so blocks do not
// synchronize. Rows after the listed ones fill the host's bucket: dummies with a position outside every cache.
//
// limits: registers <= 48, spill_bytes <= 0, shared_bytes <= 0
#include "block.cuh"
#include "ragged.cuh"

namespace faser {

constexpr int kCopyThreads = 128;

__device__ inline void copy_row(const char* from, char* to, int64_t num_bytes) {
  int64_t done = 0;
  if (is_aligned(from) && is_aligned(to)) {
    const int64_t num_words = num_bytes / 16;
    for (int64_t i = threadIdx.x; i < num_words; i += kCopyThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    done = num_words * 16;
  }
  for (int64_t i = done + threadIdx.x; i < num_bytes; i += kCopyThreads) to[i] = from[i];
}

__device__ inline void clear_row(char* to, int64_t num_bytes) {
  for (int64_t i = threadIdx.x; i < num_bytes; i += kCopyThreads) to[i] = 0;
}

}  // namespace faser

// hidden [num_rows] rows of row_bytes; positions [num_rows]; rows [num_kept]: ascending indices, then -1 for dummies;
// cu_q_lens [num_requests + 1]; kv_lens [num_requests] includes the new rows. Every request keeps a prefix of its rows.
extern "C" __global__ void __launch_bounds__(faser::kCopyThreads)
    compact_rows(const char* hidden, const int32_t* positions, const int32_t* rows, const int32_t* cu_q_lens,
                 const int32_t* kv_lens, int32_t num_rows, int32_t num_kept, int32_t num_requests, int32_t row_bytes,
                 int32_t max_seq_len, char* kept_hidden, int32_t* kept_positions, int32_t* request_ids,
                 int32_t* kept_cu_q_lens, int32_t* kept_kv_lens) {
  const int32_t i = blockIdx.x;
  if (i < num_kept) {
    const int32_t row = rows[i];
    const bool exists = row >= 0 && row < num_rows;
    char* to = kept_hidden + static_cast<int64_t>(i) * row_bytes;
    if (exists) {
      faser::copy_row(hidden + static_cast<int64_t>(row) * row_bytes, to, row_bytes);
    } else {
      faser::clear_row(to, row_bytes);
    }
    if (threadIdx.x == 0) {
      kept_positions[i] = exists ? positions[row] : max_seq_len;
      request_ids[i] = exists ? faser::request_of_row(cu_q_lens, num_requests, row) : -1;
    }
  }
  const int32_t num_threads = static_cast<int32_t>(gridDim.x) * faser::kCopyThreads;
  for (int32_t b = i * faser::kCopyThreads + static_cast<int32_t>(threadIdx.x); b <= num_requests; b += num_threads) {
    const int32_t end = faser::num_rows_below(rows, num_kept, cu_q_lens[b]);
    kept_cu_q_lens[b] = end;
    if (b < num_requests) {
      const int32_t kept = faser::num_rows_below(rows, num_kept, cu_q_lens[b + 1]) - end;
      kept_kv_lens[b] = kv_lens[b] - (cu_q_lens[b + 1] - cu_q_lens[b] - kept);
    }
  }
}
