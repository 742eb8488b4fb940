// Batches for the CPU engine: any slots, rows, tokens, positions, blocks and branches. It runs them or refuses them,
// and logits of what it runs do not depend on the number of threads.
#include <algorithm>
#include <memory>

#include "random_model.h"

namespace {

constexpr int kBlock = 16, kMaxRows = 24, kMaxRequests = 5, kMaxBranches = 2, kMaxBlocks = 8;

// A number that is mostly in range.
int near(FuzzInput& input, int end) {
  const int number = input.take<uint8_t>();
  if (number >= 250) return std::vector<int>{-1, end, 0x7fffffff, -0x7fffffff - 1, end + 1, 1 << 20}[number - 250];
  return end > 0 ? number % end : 0;
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  setenv("FASER_CPU_TEAM", "always", 1);
  static faser_pool* const pools[] = {faser_pool_create(nullptr, 1, 0), faser_pool_create(nullptr, 3, 20)};
  FuzzInput input(data, size);
  RandomModel made(input, ModelKind::kDecoder);
  faser_model& model = made.model;
  const int num_blocks = input.in(1, 12);
  faser_engine* engines[2];
  for (int i = 0; i < 2; ++i) {
    int32_t status;
    engines[i] = faser_engine_create(&model, pools[i], num_blocks, kBlock, kMaxRows, kMaxRequests, &status);
    fuzz_expect(engines[i] != nullptr && status == FASER_OK, "an engine is made");
  }
  const int stride = faser_engine_logits_stride(engines[0]);
  int next_layer = 0;
  bool has_shared = false;  // requests of one block: what they read of each other's rows depends on the order
  for (int pass = input.in(1, 3); pass > 0; --pass) {
    const int num_requests = input.in(0, 15) == 0 ? near(input, kMaxRequests + 1) : input.in(0, kMaxRequests);
    const int num_lists = num_requests < 0 || num_requests > kMaxRequests ? 0 : num_requests;
    std::vector<int32_t> slots, cu_rows = {0}, tokens, positions;
    for (int i = 0; i < num_lists; ++i) {
      slots.push_back(near(input, kMaxRequests));
      const int count = input.in(0, 6), first = near(input, model.max_seq_len);
      for (int r = 0; r < count; ++r) {
        tokens.push_back(near(input, model.vocab_size));
        positions.push_back(input.take<uint8_t>() == 255 ? near(input, 50)
                                                         : static_cast<int32_t>(static_cast<uint32_t>(first) + r));
      }
      cu_rows.push_back(input.take<uint8_t>() == 255 ? near(input, 9) : static_cast<int>(tokens.size()));
    }
    const int max_blocks = input.in(1, kMaxBlocks);
    std::vector<int32_t> table(static_cast<size_t>(kMaxRequests) * max_blocks), parents(kMaxRequests);
    for (int32_t& block : table) block = near(input, num_blocks);
    for (int32_t& parent : parents) parent = near(input, num_lists);
    std::vector<int32_t> logit_rows;
    for (size_t row = 0; row < tokens.size(); ++row)
      if (input.flag()) logit_rows.push_back(input.take<uint8_t>() == 255 ? near(input, 9) : static_cast<int>(row));
    const int num_rows = input.in(0, 31) == 0 ? near(input, kMaxRows) : static_cast<int>(tokens.size());
    if (num_rows > static_cast<int>(tokens.size()) || num_lists != num_requests) continue;  // the lists' own lengths
    const int num_branches = input.in(0, 3) == 0 ? near(input, kMaxBranches + 1) : 0;
    if (num_branches > kMaxRequests) continue;
    const faser_batch batch = {num_requests,  num_rows,         max_blocks,   slots.data(),   cu_rows.data(),
                               tokens.data(), positions.data(), table.data(), parents.data(), num_branches};
    const int first_layer = input.in(0, 15) == 0 ? near(input, 4) : next_layer;
    const bool is_any_last = input.in(0, 15) == 0 || first_layer < 0 || first_layer >= model.num_layers;
    const int last_layer = is_any_last ? near(input, 5) : input.in(first_layer + 1, model.num_layers);
    const int num_logit_rows = static_cast<int>(logit_rows.size());
    std::vector<float> logits[2];
    int32_t status[2];
    std::vector<int32_t> used = table;
    std::sort(used.begin(), used.end());
    std::vector<int32_t> taken = slots;
    std::sort(taken.begin(), taken.end());
    has_shared |= num_branches > 0 || std::adjacent_find(used.begin(), used.end()) != used.end() ||
                  std::adjacent_find(taken.begin(), taken.end()) != taken.end();
    for (int i = 0; i < 2; ++i) {
      logits[i].assign(logit_rows.size() * static_cast<size_t>(stride), 0.0f);
      status[i] = faser_engine_forward(engines[i], &batch, first_layer, last_layer, logit_rows.data(), num_logit_rows,
                                       num_logit_rows > 0 ? logits[i].data() : nullptr);
    }
    fuzz_expect(status[0] == status[1], "both engines say the same");
    if (status[0] != FASER_OK) continue;
    fuzz_expect(has_shared || logits[0].empty() ||
                    std::memcmp(logits[0].data(), logits[1].data(), logits[0].size() * sizeof(float)) == 0,
                "logits do not depend on threads");
    next_layer = last_layer == model.num_layers ? 0 : last_layer;
    std::vector<int32_t> rows, candidates;
    for (int row = 0; row < num_rows; ++row)
      if (input.flag()) rows.push_back(input.take<uint8_t>() == 255 ? near(input, 9) : row);
    for (size_t c = 0; c < 2 * rows.size(); ++c) candidates.push_back(near(input, model.vocab_size));
    std::vector<float> scores(candidates.size());
    const int kept = static_cast<int>(rows.size());
    for (faser_engine* const engine : engines) {
      faser_engine_early_exit(engine, rows.data(), kept, candidates.data(), 2, scores.data());
      if (num_rows == kept) faser_engine_compact_rows(engine, rows.data(), kept);
      const int32_t copies[4] = {table[0], table.back(), positions.empty() ? 0 : positions[0], input.in(0, 17)};
      faser_engine_copy_kv(engine, 1, copies, copies + 1, copies + 2, copies + 3);
    }
  }
  for (faser_engine* const engine : engines) faser_engine_destroy(engine);
  return 0;
}
