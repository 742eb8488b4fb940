// Runs the CPU engine under a sanitizer: models of all kinds and quantizations, batches, drafting, rejection sampling
// and early exit, on one thread and on several. All must give the same bits.
//
//   drive_cpu [--seed=N] [--seconds=N]
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include "random_model.h"

namespace {

constexpr int kBlock = 16, kMaxRows = 48, kMaxRequests = 6, kMaxDraftLen = 4;

// An engine, and a head or another model that drafts for it, on threads of their own.
class Pair {
 public:
  Pair(const RandomModel& target, const RandomModel& draft, faser_pool* pool, int num_blocks)
      : target_(made(target, pool, num_blocks)), draft_(made(draft, pool, num_blocks)), pool_(pool) {
    const bool is_head = draft.model.head != nullptr || draft.model.medusa != nullptr || draft.model.block != nullptr;
    if (!is_head) return;
    const std::vector<int32_t> medusa_layers = {target.model.num_layers};
    const std::vector<int32_t>& layers = draft.model.medusa != nullptr ? medusa_layers : draft.target_layers;
    fuzz_expect(faser_engine_attach_head(draft_, target_, layers.data(), static_cast<int>(layers.size())) == FASER_OK,
                "a head is attached");
  }
  ~Pair() {
    faser_engine_destroy(draft_);
    faser_engine_destroy(target_);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  faser_engine* target() const { return target_; }
  faser_engine* draft() const { return draft_; }
  faser_pool* pool() const { return pool_; }

 private:
  static faser_engine* made(const RandomModel& model, faser_pool* pool, int num_blocks) {
    int32_t status;
    faser_engine* const engine =
        faser_engine_create(&model.model, pool, num_blocks, kBlock, kMaxRows, kMaxRequests, &status);
    fuzz_expect(engine != nullptr && status == FASER_OK, "an engine is made");
    fuzz_expect(faser_engine_memory_bytes(engine) >= 0, "its memory is counted");
    return engine;
  }

  faser_engine *target_, *draft_;
  faser_pool* pool_;
};

// The committed output of a run: tokens, and the bits of logits and scores.
using Trace = std::vector<uint32_t>;

void add(Trace& trace, const std::vector<float>& numbers) {
  for (const float number : numbers) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    trace.push_back(bits);
  }
}

// A slot's request with its own memory.
struct Slot {
  std::vector<int32_t> tokens, candidates, runners_up;
  std::vector<float> margins, probs;
  std::vector<int8_t> sources;
  int32_t num_tokens = 0, num_target = 0, num_draft = 0;  // tokens, and of those with either's KV
  int32_t num_context = 0;                                // and of a block drafter
};

// Requests that are served to their ends, as the executor does: the target reads prompts in chunks, the draft follows
// and drafts, the target verifies in segments with rows dropped between, rejection sampling commits.
Trace serve(const Pair& pair, const RandomModel& target, uint64_t seed, bool is_block = false) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&random](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const faser_model& model = target.model;
  const int vocab = model.vocab_size, length = model.max_seq_len - kMaxDraftLen - 1,
            stride = faser_engine_logits_stride(pair.target());
  Trace trace;
  if (length < 3) return trace;
  const int num_requests = 1 + below(kMaxRequests), max_blocks = (model.max_seq_len + kBlock - 1) / kBlock;
  std::vector<Slot> slots(kMaxRequests);
  std::vector<faser_sampling> sampling(kMaxRequests);
  std::vector<int32_t> table(static_cast<size_t>(kMaxRequests) * max_blocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  for (int i = 0; i < num_requests; ++i) {
    Slot& slot = slots[i];
    const size_t size = static_cast<size_t>(model.max_seq_len + kMaxDraftLen + 2);
    slot.tokens.resize(size);
    slot.margins.resize(size);
    slot.candidates.resize(size * FASER_NUM_CANDIDATES);
    slot.runners_up.resize(size);
    slot.sources.resize(size);
    slot.probs.resize(static_cast<size_t>(kMaxDraftLen) * vocab);
    slot.num_tokens = 1 + below(std::min(length - 1, 30));
    for (int t = 0; t < slot.num_tokens; ++t) slot.tokens[t] = below(vocab);
    faser_sampling& s = sampling[i];
    s = {};
    s.tokens = slot.tokens.data();
    s.draft_margins = slot.margins.data();
    s.draft_candidates = slot.candidates.data();
    s.draft_runners_up = slot.runners_up.data();
    s.draft_sources = slot.sources.data();
    s.draft_probs = slot.probs.data();
    s.prompt_len = slot.num_tokens;
    s.mode = i % 3;
    s.key = seed + static_cast<uint64_t>(i);
    s.temperature = s.mode == FASER_GREEDY ? 0.0f : 0.8f;
    s.top_k = below(2) * 40;
    s.top_p = below(2) == 0 ? 1.0f : 0.9f;
    s.repetition_penalty = below(3) == 0 ? 1.2f : 1.0f;
  }
  for (int step = 0; step < 12; ++step) {
    std::vector<int32_t> active, num_tokens, num_drafts, num_new, zeros, cu_rows = {0}, ids, positions, logit_rows;
    // The target's rows: all it lacks, then the drafts of the last step, which are the tokens beyond.
    for (int i = 0; i < num_requests; ++i) {
      Slot& slot = slots[i];
      if (slot.num_tokens >= length) continue;
      const int drafted = slot.num_draft > slot.num_tokens ? slot.num_draft - slot.num_tokens : 0;
      const int room = kMaxRows / kMaxRequests, end = std::min(slot.num_target + room, slot.num_tokens + drafted);
      active.push_back(i);
      for (int t = slot.num_target; t < end; ++t) {
        if (t >= slot.num_tokens - 1) logit_rows.push_back(static_cast<int32_t>(ids.size()));
        ids.push_back(slot.tokens[t]);
        positions.push_back(t);
      }
      cu_rows.push_back(static_cast<int32_t>(ids.size()));
    }
    if (active.empty()) break;
    const int count = static_cast<int>(active.size()), rows = static_cast<int>(ids.size());
    const faser_batch batch = {
        count, rows, max_blocks, active.data(), cu_rows.data(), ids.data(), positions.data(), table.data(), nullptr, 0};
    std::vector<float> logits(logit_rows.size() * static_cast<size_t>(stride));
    for (int layer = 0; layer < model.num_layers;) {
      const int end = 1 + layer + below(model.num_layers - layer);
      fuzz_expect(faser_engine_forward(pair.target(), &batch, layer, end, logit_rows.data(),
                                       static_cast<int>(logit_rows.size()), logits.data()) == FASER_OK,
                  "the target runs");
      if (end < model.num_layers) {
        std::vector<int32_t> candidates(static_cast<size_t>(rows) * 3), all(rows);
        for (int32_t& candidate : candidates) candidate = below(vocab + 1) - 1;
        for (int r = 0; r < rows; ++r) all[r] = r;
        std::vector<float> scores(candidates.size()), hidden(static_cast<size_t>(rows) * model.hidden_size);
        const faser_status expected = model.output_ids == nullptr ? FASER_OK : FASER_BAD_ARGUMENT;
        fuzz_expect(
            faser_engine_early_exit(pair.target(), all.data(), rows, candidates.data(), 3, scores.data()) == expected &&
                faser_engine_hidden_rows(pair.target(), rows, hidden.data()) == FASER_OK,
            "an early exit is asked");
        add(trace, scores);
        add(trace, hidden);
      }
      layer = end;
    }
    for (size_t row = 0; row < logit_rows.size(); ++row)
      add(trace, std::vector<float>(logits.begin() + static_cast<std::ptrdiff_t>(row * stride),
                                    logits.begin() + static_cast<std::ptrdiff_t>(row * stride + vocab)));
    std::vector<int32_t> cu_logits = {0}, pending;
    for (int a = 0; a < count; ++a) {
      Slot& slot = slots[active[a]];
      slot.num_target = cu_rows[a + 1] > cu_rows[a] ? positions[cu_rows[a + 1] - 1] + 1 : slot.num_target;
      num_tokens.push_back(slot.num_tokens);
      pending.push_back(std::max(0, slot.num_draft - slot.num_tokens));
      cu_logits.push_back(cu_logits.back() + std::max(0, slot.num_target - slot.num_tokens + 1));
    }
    std::vector<int32_t> out(static_cast<size_t>(count) * (kMaxDraftLen + 1)), num_out(count), accepted(count),
        outcomes(count), statuses(count);
    const int32_t status = faser_accept(pair.pool(), count, active.data(), sampling.data(), logits.data(), stride,
                                        vocab, cu_logits.data(), num_tokens.data(), pending.data(), kMaxDraftLen,
                                        out.data(), num_out.data(), accepted.data(), outcomes.data(), statuses.data());
    fuzz_expect(status == FASER_OK, "rejection sampling runs");
    for (int a = 0; a < count; ++a) {
      Slot& slot = slots[active[a]];
      for (int j = 0; j < num_out[a]; ++j) {
        const int32_t token = out[static_cast<size_t>(a) * (kMaxDraftLen + 1) + j];
        slot.tokens[slot.num_tokens++] = token;
        trace.push_back(static_cast<uint32_t>(token));
      }
      slot.num_target = std::min(slot.num_target, slot.num_tokens - 1);
      if (outcomes[a] == FASER_FAILED) slot.num_tokens = length;  // it ends
    }
    // The draft's rows: those that it lacks, of requests whose prompt the target has read.
    std::vector<int32_t> draft_slots;
    cu_rows = {0};
    ids.clear();
    positions.clear();
    num_tokens.clear();
    for (int a = 0; a < count; ++a) {
      Slot& slot = slots[active[a]];
      slot.num_draft = std::min(slot.num_draft, slot.num_tokens - 1);
      if (slot.num_target != slot.num_tokens - 1 || slot.num_tokens + kMaxDraftLen >= length || slot.num_tokens < 2)
        continue;
      const int wanted = below(kMaxDraftLen + 1), first = is_block ? slot.num_context : slot.num_draft;
      const int end = is_block && wanted == 0 ? slot.num_tokens - 1 : slot.num_tokens;  // that the target has run
      if (first >= end || end - first > kMaxRows - static_cast<int>(ids.size())) continue;
      slot.num_context = slot.num_tokens - 1;
      draft_slots.push_back(active[a]);
      for (int t = first; t < end; ++t) {
        ids.push_back(slot.tokens[t]);
        positions.push_back(t);
      }
      cu_rows.push_back(static_cast<int32_t>(ids.size()));
      num_tokens.push_back(slot.num_tokens);
      num_drafts.push_back(0);
      num_new.push_back(wanted);
    }
    const int num_drafting = static_cast<int>(draft_slots.size());
    if (num_drafting == 0) continue;
    const faser_batch rows_of_draft = {num_drafting,     static_cast<int32_t>(ids.size()),
                                       max_blocks,       draft_slots.data(),
                                       cu_rows.data(),   ids.data(),
                                       positions.data(), table.data(),
                                       nullptr,          0};
    std::vector<float> workspace(static_cast<size_t>(kMaxRows) * faser_engine_logits_stride(pair.draft()));
    std::vector<int32_t> drafted(num_drafting);
    fuzz_expect(
        faser_draft(pair.draft(), pair.pool(), &rows_of_draft, sampling.data(), num_tokens.data(), num_drafts.data(),
                    num_new.data(), kMaxDraftLen, nullptr, workspace.data(), drafted.data()) == FASER_OK,
        "drafting runs");
    for (int a = 0; a < num_drafting; ++a) {
      Slot& slot = slots[draft_slots[a]];
      slot.num_draft = slot.num_tokens + drafted[a];
      for (int j = 0; j < drafted[a]; ++j) trace.push_back(static_cast<uint32_t>(slot.tokens[slot.num_tokens + j]));
    }
  }
  return trace;
}

void run_model(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(512);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  FuzzInput input(bytes.data(), bytes.size());
  const ModelKind kinds[] = {ModelKind::kDecoder, ModelKind::kEagle, ModelKind::kMtp, ModelKind::kMedusa,
                             ModelKind::kBlock};
  RandomModel target(input, ModelKind::kDecoder, nullptr, true);
  target.model.max_seq_len = 60;
  const ModelKind kind = kinds[seed % 5];
  RandomModel draft(input, kind, &target.model, true);
  draft.model.max_seq_len = 60;
  const int num_blocks = kMaxRequests * 4;
  Trace first;
  for (const int num_threads : {1, 2, 4}) {
    faser_pool* const pool = faser_pool_create(nullptr, num_threads, num_threads == 2 ? 0 : 50);
    fuzz_expect(pool != nullptr, "a pool is made");
    {
      const Pair pair(target, draft, pool, num_blocks);
      const Trace trace = serve(pair, target, seed, kind == ModelKind::kBlock);
      if (num_threads == 1) first = trace;
      fuzz_expect(trace == first, "results do not depend on threads");
    }
    faser_pool_destroy(pool);
  }
}

// Two engines at once, each on its own pool, as the draft's and the target's lanes run; and engines that change pools.
void run_lanes(uint64_t seed) {
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 2; ++lane)
    lanes.emplace_back([=] { run_model(seed + 1000 + static_cast<uint64_t>(lane)); });
  for (std::thread& lane : lanes) lane.join();
  std::vector<uint8_t> bytes(64, static_cast<uint8_t>(seed));
  FuzzInput input(bytes.data(), bytes.size());
  RandomModel model(input, ModelKind::kDecoder, nullptr, true);
  model.model.max_seq_len = 60;
  faser_pool* const pools[] = {faser_pool_create(nullptr, 3, 0), faser_pool_create(nullptr, 1, 0)};
  {
    const Pair pair(model, model, pools[0], kMaxRequests * 4);
    const Trace trace = serve(pair, model, seed);
    fuzz_expect(faser_engine_set_pool(pair.target(), pools[1]) == FASER_OK, "a pool is changed");
    fuzz_expect(serve(pair, model, seed) == trace, "results do not depend on the pool");
  }
  for (faser_pool* const pool : pools) faser_pool_destroy(pool);
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  uint64_t seed = 1;
  double seconds = 5;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--seed=", 0) == 0) seed = std::stoull(argument.substr(7));
    if (argument.rfind("--seconds=", 0) == 0) seconds = std::stod(argument.substr(10));
  }
  setenv("FASER_CPU_TEAM", "always", 1);  // before any thread
  const auto started = Clock::now();
  int num_rounds = 0;
  do {
    run_model(seed);
    if (seed % 4 == 0) run_lanes(seed);
    ++seed;
    ++num_rounds;
  } while (num_rounds < 5 || std::chrono::duration<double>(Clock::now() - started).count() < seconds);
  std::printf("%d models on %s\n", num_rounds, faser_isa());
}
