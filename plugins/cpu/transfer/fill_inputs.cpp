// Writes the inputs of a pass for an engine with its own memory; ops/transfer/fill_inputs.py computes the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "faser_cpu.h"

namespace faser {
namespace {

enum Section { kCuQLens, kKvLens, kTokenIds, kPositions, kLogitRows, kFirstBranch, kBlockTable };

// Copies `count` numbers and clears those after them, up to `size`.
void fill(int32_t* to, const int32_t* from, int32_t count, int32_t size) {
  if (count > 0) std::memcpy(to, from, sizeof(int32_t) * static_cast<size_t>(count));
  std::fill(to + count, to + size, 0);
}

// Checks that positions are consecutive and below max_seq_len, and that their blocks exist.
int32_t check_request(const faser_pass_limits& limits, const int32_t* positions, int32_t count, const int32_t* blocks,
                      int32_t num_columns) {
  if (count < 1) return FASER_BAD_ARGUMENT;
  const int32_t first = positions[0], last = positions[count - 1];
  if (first < 0 || last >= limits.max_seq_len) return FASER_BAD_POSITION;
  for (int32_t j = 0; j < count; ++j) {
    if (positions[j] != first + j) return FASER_BAD_POSITION;
  }
  const int32_t num_blocks = last / limits.tokens_per_block + 1;
  if (num_blocks > num_columns) return FASER_BAD_BLOCK;
  for (int32_t b = 0; b < num_blocks; ++b) {
    if (blocks[b] < 0 || blocks[b] >= limits.num_blocks) return FASER_BAD_BLOCK;
  }
  return FASER_OK;
}

int32_t check_branches(const int32_t* cu_rows, int32_t num_parents, const int32_t* parents, int32_t num_branches) {
  for (int32_t k = 0; k < num_branches; ++k) {
    const int32_t i = num_parents + k;
    if (cu_rows[i + 1] - cu_rows[i] != 1 || parents[k] < 0 || parents[k] >= num_parents) return FASER_BAD_ARGUMENT;
    if (k > 0 && parents[k] < parents[k - 1]) return FASER_BAD_ARGUMENT;
  }
  return FASER_OK;
}

}  // namespace
}  // namespace faser

int32_t faser_fill_inputs(const faser_pass_limits* limits, int32_t num_requests, int32_t num_rows, const int32_t* slots,
                          const int32_t* cu_rows, const int32_t* token_ids, const int32_t* positions,
                          int32_t num_logit_rows, const int32_t* logit_rows, const int32_t* block_table,
                          int32_t num_slots, int32_t num_columns, const int32_t* branch_parents, int32_t num_branches,
                          int32_t* out, const int64_t* starts) {
  using namespace faser;
  const int32_t most_requests = limits->max_num_requests, most_rows = limits->max_num_rows;
  if (num_requests < 0 || num_requests > most_requests || num_rows < 0 || num_rows > most_rows || num_logit_rows < 0 ||
      num_logit_rows > most_rows || num_columns > limits->max_blocks_per_seq || num_branches < 0 ||
      num_branches > std::min(num_requests, limits->max_num_branches) || cu_rows[0] != 0 ||
      cu_rows[num_requests] != num_rows) {
    return FASER_BAD_ARGUMENT;
  }
  for (int32_t row = 0; row < num_rows; ++row) {
    if (token_ids[row] < 0 || token_ids[row] >= limits->vocab_size) return FASER_BAD_TOKEN;
  }
  const int32_t num_parents = num_requests - num_branches;
  const int32_t status = check_branches(cu_rows, num_parents, branch_parents, num_branches);
  if (status != FASER_OK) return status;

  int32_t longest = 0;  // blocks
  for (int32_t row = 0; row < num_rows; ++row) {
    longest = std::max(longest, positions[row] / limits->tokens_per_block + 1);
  }
  longest = std::min(longest, num_columns);
  int32_t* kv_lens = out + starts[kKvLens];
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t begin = cu_rows[i], count = cu_rows[i + 1] - begin;
    if (count < 1 || cu_rows[i + 1] > num_rows || slots[i] < 0 || slots[i] >= num_slots) return FASER_BAD_ARGUMENT;
    const int32_t* blocks = block_table + static_cast<size_t>(slots[i]) * static_cast<size_t>(num_columns);
    const int32_t found = check_request(*limits, positions + begin, count, blocks, num_columns);
    if (found != FASER_OK) return found;
    kv_lens[i] = positions[begin] + count;
    int32_t* table = out + starts[kBlockTable] + static_cast<int64_t>(i) * limits->max_blocks_per_seq;
    std::memcpy(table, blocks, sizeof(int32_t) * static_cast<size_t>(longest));
  }
  std::fill(kv_lens + num_requests, kv_lens + most_requests, 0);
  int32_t* cu_q_lens = out + starts[kCuQLens];
  std::memcpy(cu_q_lens, cu_rows, sizeof(int32_t) * static_cast<size_t>(num_requests + 1));
  std::fill(cu_q_lens + num_requests + 1, cu_q_lens + most_requests + 1, num_rows);
  fill(out + starts[kTokenIds], token_ids, num_rows, most_rows);
  fill(out + starts[kPositions], positions, num_rows, most_rows);
  fill(out + starts[kLogitRows], logit_rows, num_logit_rows, most_rows);
  if (starts[kFirstBranch] >= 0) {
    int32_t* first_branch = out + starts[kFirstBranch];
    int32_t k = 0;
    for (int32_t i = 0; i < num_parents; ++i) {
      while (k < num_branches && branch_parents[k] < i) ++k;
      first_branch[i] = num_parents + k;
    }
    std::fill(first_branch + num_parents, first_branch + most_requests + 1, num_requests);
  }
  return FASER_OK;
}
