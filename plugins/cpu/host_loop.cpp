// The reference of `faser bench host`: the bookkeeping of a step in as few instructions as possible.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "faser_cpu.h"

namespace faser {
namespace {

constexpr int32_t kBlock = 32, kPrompt = 32, kAcceptedOf100 = 70;

struct Request {
  int32_t num_tokens, num_blocks, num_steps, num_accepted;
  std::vector<int32_t> tokens, blocks;
};

struct Batch {
  std::vector<int32_t> slots, cu_rows, token_ids, positions, logit_rows;
};

uint32_t next_random(uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

// Allocates blocks and rows for a request's last token and its drafts.
void schedule(Request& request, int32_t slot, int32_t num_drafts, int32_t& next_block, Batch& batch) {
  const int32_t end = request.num_tokens + num_drafts;
  while (request.num_blocks * kBlock < end) request.blocks[request.num_blocks++] = next_block++;
  for (int32_t position = request.num_tokens - 1; position < end; ++position) {
    batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.token_ids.push_back(request.tokens[position]);
    batch.positions.push_back(position);
  }
  batch.slots.push_back(slot);
  batch.cu_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
}

// Verifies the drafts, commits the accepted ones and one more token, and frees the blocks of the others. Returns
// true if the request ended.
bool update(Request& request, int32_t num_drafts, int32_t end_id, uint64_t& state, std::vector<int32_t>& output) {
  int32_t accepted = 0;
  while (accepted < num_drafts && next_random(state) % 100 < kAcceptedOf100) ++accepted;
  request.tokens[request.num_tokens + accepted] = static_cast<int32_t>(next_random(state) % 32000);
  bool ended = false;
  for (int32_t i = 0; i <= accepted; ++i) {
    const int32_t token = request.tokens[request.num_tokens + i];
    output.push_back(token);
    ended = ended || token == end_id;
  }
  request.num_tokens += accepted + 1;
  request.num_accepted += accepted;
  ++request.num_steps;
  request.num_blocks = std::min(request.num_blocks, (request.num_tokens + kBlock - 1) / kBlock);
  return ended;
}

}  // namespace
}  // namespace faser

int64_t faser_host_loop(int32_t num_requests, int32_t num_drafts, int32_t num_steps, uint64_t seed) {
  using namespace faser;
  if (num_requests < 1 || num_drafts < 0 || num_steps < 0) return FASER_BAD_ARGUMENT;
  const int32_t capacity = kPrompt + (num_steps + 1) * (num_drafts + 1);
  std::vector<Request> requests(num_requests);
  for (Request& request : requests) {
    request = {kPrompt, 0, 0, 0, std::vector<int32_t>(capacity), std::vector<int32_t>(capacity / kBlock + 1)};
  }
  Batch batch;
  std::vector<int32_t> output;
  uint64_t state = seed;
  int64_t num_output = 0;
  for (int32_t step = 0; step < num_steps; ++step) {
    int32_t next_block = 0;
    for (std::vector<int32_t>* column :
         {&batch.slots, &batch.cu_rows, &batch.token_ids, &batch.positions, &batch.logit_rows, &output}) {
      column->clear();
    }
    for (int32_t i = 0; i < num_requests; ++i) schedule(requests[i], i, num_drafts, next_block, batch);
    for (Request& request : requests) {
      if (update(request, num_drafts, -1, state, output)) return FASER_BAD_TOKEN;
    }
    num_output += static_cast<int64_t>(output.size());
  }
  return num_output;
}
