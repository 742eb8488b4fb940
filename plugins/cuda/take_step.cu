// Prepares the inputs of a draft step's pass: one row per request, its newest token.
//
// One block for each of max_requests. Bound by a launch's own time.
//
// limits: registers <= 32, spill_bytes <= 0, shared_bytes <= 0
#include <cstdint>

#include "common.cuh"

// Inputs: newest, known, remaining [num_requests]: a request with nothing remaining writes no KV; table [num_requests,
// columns]. Outputs: token_ids, positions, logit_rows [at least num_requests], kv_lens [max_requests], cu_q_lens
// [max_requests + 1], block_table [max_requests, max_blocks_per_seq], max_blocks_per_seq at least columns.
extern "C" __global__ void __launch_bounds__(128)
    take_step(const int32_t* newest, const int32_t* known, const int32_t* remaining, const int32_t* table,
              int32_t num_requests, int32_t max_requests, int32_t columns, int32_t max_blocks_per_seq,
              int32_t* token_ids, int32_t* positions, int32_t* logit_rows, int32_t* kv_lens, int32_t* cu_q_lens,
              int32_t* block_table) {
  const int32_t request = blockIdx.x;
  if (request >= max_requests) return;
  const bool is_used = request < num_requests;
  if (threadIdx.x == 0) {
    const int32_t kv_len = is_used && remaining[request] > 0 ? known[request] : 0;
    kv_lens[request] = kv_len;
    cu_q_lens[request + 1] = is_used ? request + 1 : num_requests;
    if (request == 0) cu_q_lens[0] = 0;
    if (is_used) {
      token_ids[request] = newest[request];
      positions[request] = kv_len > 0 ? kv_len - 1 : 0;
      logit_rows[request] = request;
    }
  }
  if (!is_used) return;
  for (int32_t i = threadIdx.x; i < columns; i += blockDim.x) {
    block_table[static_cast<int64_t>(request) * max_blocks_per_seq + i] =
        table[static_cast<int64_t>(request) * columns + i];
  }
}
