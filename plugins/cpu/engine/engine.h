// The engine: one model, its KV memory and workspaces.
#ifndef FASER_ENGINE_H_
#define FASER_ENGINE_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "faser_cpu.h"
#include "kernels.h"
#include "pool.h"
#include "team_chooser.h"

namespace faser {

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Words of a column, and panels, of a packed matrix.
inline int num_pairs(int num_inputs) { return round_up(num_inputs, 32) / 2; }
inline int num_panels(int num_outputs) { return round_up(num_outputs, kPanel) / kPanel; }

inline int log2_of(int value) { return 31 - __builtin_clz(static_cast<unsigned>(value)); }

// Zeroed memory from the system, untouched until used; throws std::bad_alloc.
class Memory {
 public:
  explicit Memory(size_t num_bytes);
  Memory(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  void* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  void* data_;
  size_t num_bytes_;
};

// Norm weights and biases, zero-padded so that kernels need no tail handling.
struct LayerVectors {
  const float *input_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm, *gate_up_bias, *down_bias, *router_bias;
};

// Measurements of one pool.
struct PoolChoosers {
  const faser_pool* pool;
  TeamChooser passes[32], exits[32];  // by log2 of the number of rows
};

// Rows of a head whose outputs are kept by entry. continues: their features are the outputs kept for these entries.
struct HeadRows {
  const int32_t *rows, *entries;
  int count;
  bool continues;
};

// Rows with logits that one Medusa head computes.
struct MedusaRun {
  int head, first, count;
};

// Reads a row of pairs, which are bf16 or floats that hold bf16 values.
void read_pairs(const char* x, int size, size_t pair_bytes, float* values);

// Requests that a block drafter drafts for in a pass: slot, last committed token, and number of drafts.
struct BlockRows {
  const int32_t *slots, *token_ids, *positions, *num_places;
  int count;
};

constexpr int kMaxSelected = 256;  // candidates of a draft
constexpr int kMaxExperts = 4096;

// The batch of a block pass. Its rows begin in the engine's own blocks, from num_blocks on, blocks_per_request each.
struct BlockMemory {
  BlockMemory(int max_num_requests, int block_size, int max_seq_len, int tokens_per_block);

  const int max_num_requests, blocks_per_request, max_blocks_per_seq;
  std::vector<int32_t> slots, cu_rows, token_ids, positions, logit_rows, table;
};

// A row's position in the KV of a branch, which needs the row too.
struct BranchRow {
  int row, block, offset;
};

// Rows of one expert: pairs first to first + count - 1 of the pass.
struct ExpertGroup {
  int expert, first, count;
};

// A pass's (row, expert) pairs, sorted by expert and then row. A chunk is as many pairs as the buffers hold, num_pairs
// or fewer, and begins at a multiple of that number.
struct ExpertPairs {
  int num_pairs = 0;
  int32_t *experts = nullptr, *places = nullptr;  // [row, top_k] experts ascending, and their places in sorted order
  float* weights = nullptr;                       // [row, top_k]
  int32_t* rows = nullptr;                        // in sorted order
  std::vector<int32_t> next;                      // by expert, while pairs are sorted
  std::vector<ExpertGroup> groups;                // none spans two chunks
  float* logits = nullptr;                        // of the router, by row
  int logits_stride = 0;
  char* x = nullptr;            // of a chunk: inputs of the rows (their activations are in x_mlp_)
  uint32_t* x_bytes = nullptr;  // with activation_bits 8: the 8-bit inputs of the next product
  float* outputs = nullptr;     // of a chunk
  char* x_shared = nullptr;     // of the shared expert, by row
  float *shared_outputs = nullptr, *shared_gates = nullptr;
  int shared_pairs = 0;
  Counter counters[2];       // of gate_up and down
  int64_t num_distinct = 0;  // experts read in the last pass, and layers that ran
  int num_layers = 0;
};

// A tile of attention, for any layer.
struct TileRange {
  int request, kv_head;
  int first_query, num_queries;  // queries of the request and KV head: row-major over (row, query head of the group)
};

}  // namespace faser

struct faser_engine {
 public:
  // Throws std::bad_alloc. The arguments are valid.
  faser_engine(const faser_model& model, faser_pool* pool, int num_blocks, int tokens_per_block, int max_num_tokens,
               int max_num_requests);

  // kept: only for heads; without it, Medusa heads give the first drafts' logits.
  int32_t forward(const faser_batch& batch, int first_layer, int last_layer, const int32_t* logit_rows,
                  int num_logit_rows, float* logits, const faser::HeadRows* kept = nullptr);
  int32_t attach(faser_engine* target, const int32_t* layers, int num_layers);  // throws std::bad_alloc
  bool is_head() const { return has_head_ || has_medusa_ || is_block(); }
  bool is_block() const { return memory_of_blocks_ != nullptr; }
  int max_blocks_of_pass() const { return memory_of_blocks_->max_num_requests; }
  int num_places() const { return block_.block_size - block_.first_slot; }
  // Computes the logits of the first num_places[i] drafts of each request, in turn. batch: for its block table.
  int32_t draft_blocks(const faser_batch& batch, const faser::BlockRows& rows, float* logits);
  // Edits one row of draft_blocks' logits for each request, by the token before its next draft.
  void add_previous(int count, const int32_t* token_ids, const float* all_logits, float* const* logits);
  bool is_mtp() const { return has_head_ && head_.fc == nullptr; }
  int32_t compact_rows(const int32_t* rows, int num_rows);
  int32_t early_exit(const int32_t* rows, int num_rows, const int32_t* candidates, int num_candidates, float* scores);
  int32_t hidden_rows(int num_rows, float* hidden) const;
  int32_t copy_kv(int num_copies, const int32_t* from, const int32_t* to, const int32_t* first, const int32_t* end);
  void set_pool(faser_pool* pool);  // throws std::bad_alloc, without any change
  int num_layers() const { return model_.num_layers; }
  int vocab_size() const { return model_.vocab_size; }
  int64_t memory_bytes() const { return num_bytes_; }
  double distinct_experts() const {
    return pairs_.num_layers > 0 ? static_cast<double>(pairs_.num_distinct) / pairs_.num_layers : 0.0;
  }
  int logits_stride() const { return faser::round_up(model_.vocab_size, faser::kPanel); }

 private:
  template <typename T>
  T* allocate(size_t count);
  char* allocate_bytes(size_t num_bytes);
  const float* padded_copy(const float* source, int size, int multiple);

  int32_t check(const faser_batch& batch, int first_layer, int last_layer, const int32_t* logit_rows,
                int num_logit_rows) const;
  void plan_tiles(const faser_batch& batch);
  void plan_branches(const faser_batch& batch);
  int64_t work_of(int num_rows, int num_layers, int num_logit_rows) const;
  // Runs body(team) on one worker or on a useful number of workers, whichever was faster for this number of rows.
  template <typename Body>
  void run_timed(int num_rows, int64_t work, int num_parts, Body&& body);
  void begin_rows(const faser::Team& team, const faser_batch& batch, bool embed);
  void run_layer(const faser::Team& team, const faser_batch& batch, int layer);
  void finish_layer(const faser::Team& team, const faser_batch& batch, int layer);  // after its qkv
  void run_experts(const faser::Team& team, int num_rows, int layer);               // in place of gate_up and down
  void allocate_experts(size_t num_rows);
  void choose_experts(int row);
  void sort_pairs(int num_rows);
  void run_chunk(const faser::Team& team, int num_rows, int layer, const faser::ExpertGroup* groups, int num_groups);
  void run_shared_expert(const faser::Team& team, int num_rows, int layer);
  void attend_rows(const faser::Team& team, const faser_batch& batch, int layer);  // of qkv_, to x_attention_
  void append_rows(const faser::Team& team, const faser_batch& batch, int layer);  // queries, keys and values of qkv_
  void capture_rows(const faser::Team& team, const faser_batch& batch, int layer);
  void run_head_layers(const faser::Team& team, const faser_batch& batch, const faser::HeadRows* kept);
  void keep_outputs(const faser::Team& team, const faser::HeadRows& kept);
  void gather_features(const faser_batch& batch, int row, char* x) const;
  void norm_features(float* values, char* x) const;
  void plan_medusa(const faser::HeadRows& kept, int num_logit_rows);
  void run_medusa(const faser::Team& team, const faser_batch& batch, const faser::HeadRows& kept, int num_logit_rows,
                  float* logits);
  void run_context(const faser::Team& team, const faser_batch& batch);
  void copy_first_blocks(const faser::Team& team, const faser_batch& batch, const faser::BlockRows& rows);
  void finish_logits(const faser::Team& team, int num_rows, float* logits) const;
  void run_conv_layer(const faser::Team& team, const faser_batch& batch, int layer);
  void prepare_conv(const faser::Team& team, int num_rows, const float* norm, const faser_conv& conv);
  void convolve_row(const faser_conv& conv, int side, int row, float* out) const;
  void add_markov(int count, const int32_t* token_ids, float* const* logits);
  void select_candidates(int32_t token_id, const float* hidden, float* logits) const;
  int32_t plan_blocks(const faser_batch& batch, const faser::BlockRows& rows);
  void spread_logits(const faser::Team& team, int num_logit_rows, float* logits) const;
  void attend(const faser::Team& team, const faser_batch& batch, int layer);
  void run_head(const faser::Team& team, const int32_t* logit_rows, int num_logit_rows, float* logits);
  // Workers meet after either. next: the matrix that the rows are multiplied with.
  void norm_rows(const faser::Team& team, int num_rows, const int32_t* rows, const float* weight,
                 const faser::Matrix& next);
  void quantize_rows(const faser::Team& team, int num_rows, const faser::Matrix& next, const char* x, int x_stride);
  faser::Gemm product(const faser::Matrix& weights, const float* bias, const char* x, int x_stride, int num_rows) const;
  faser::KvLayer kv_layer(int layer) const;
  // Index of a request's position among num_blocks * tokens_per_block.
  size_t token_index(const faser_batch& batch, int request, int position) const {
    const size_t row = static_cast<size_t>(batch.slots[request]) * batch.max_blocks_per_seq;
    const int block = batch.block_table[row + position / tokens_per_block_];
    return static_cast<size_t>(block) * tokens_per_block_ + position % tokens_per_block_;
  }
  faser::Matrix layer_matrix(const uint32_t* words, const float* scales, int num_in) const {
    return {words, scales, model_.weight_bits, model_.group_size, faser::num_pairs(num_in), model_.activation_bits};
  }
  faser::Matrix expert_matrix(const uint32_t* words, const float* scales, int num_in) const {
    if (experts_.is_mxfp4 == 0) return layer_matrix(words, scales, num_in);
    return {words, scales, 4, 32, faser::num_pairs(num_in), 16, true};
  }
  faser::Matrix lm_head() const {
    if (model_.lm_head_scales != nullptr)
      return layer_matrix(model_.lm_head, model_.lm_head_scales, model_.hidden_size);
    return {model_.lm_head, nullptr, 16, 0, faser::num_pairs(model_.hidden_size)};
  }
  char* pairs(char* base, int row, int stride) const { return base + static_cast<size_t>(row) * stride * pair_bytes_; }

  const faser::Kernels& kernels_;
  const size_t pair_bytes_;
  faser_model model_;
  std::vector<faser_layer> layers_;
  std::vector<faser::LayerVectors> vectors_;
  faser_pool* pool_ = nullptr;
  const int num_blocks_, tokens_per_block_, max_num_tokens_, max_num_requests_;
  faser::HeadShape heads_;
  std::vector<faser::Memory> memory_;
  int64_t num_bytes_ = 0;

  // Strides: floats for fp32 rows, pairs for activation rows.
  int hidden_stride_, hidden_pairs_;  // hidden rows, padded to whole panels
  int qkv_stride_, query_pairs_;      // qkv rows; pairs of all query heads, each padded
  int attention_pairs_, mlp_pairs_;   // inputs of o and down
  int mlp_size_;                      // intermediate_size padded to whole panels
  const float* final_norm_;
  int num_outputs_;                      // of the LM head
  const int32_t* output_ids_ = nullptr;  // their tokens; nullptr: the same
  float* output_logits_ = nullptr;       // where output_ids_ is set
  uint32_t* kv_;
  size_t kv_layer_words_, kv_head_words_;
  float *hidden_, *qkv_, *cos_, *sin_;
  char *x_hidden_, *queries_, *x_attention_, *x_mlp_;
  uint32_t* x_bytes_ = nullptr;  // with activation_bits 8: the next product's inputs in 8 bits, of any of those three
  int bytes_stride_ = 0;         // words
  int32_t* row_requests_;        // [max_num_tokens] request of each row
  std::vector<char*> scratch_;   // per worker
  std::vector<float*>
      worker_rows_;  // per worker: one row of early exit and one output's weights, or a head's norm_features
  std::vector<faser::TileRange> tiles_;
  std::vector<faser::BranchRow> branch_rows_;  // by row
  faser::Counter tile_counters_[2];            // by parity of the layer: one is in use while the other is reset

  const bool always_team_;                                      // FASER_CPU_TEAM=always
  std::vector<int32_t> windows_;                                // by layer; 0: none
  int widest_window_ = 0;                                       // 0: a layer has none
  std::vector<std::unique_ptr<faser::PoolChoosers>> choosers_;  // for recent pools, newest last
  faser::PoolChoosers* pool_choosers_ = nullptr;                // of pool_

  // For a target with a head: [num_blocks, tokens_per_block] rows of pairs, with all captured layers.
  std::vector<int32_t> captured_layers_;
  char* captured_ = nullptr;
  char* x_normed_ = nullptr;  // for heads that read rows after the final norm

  // For a head.
  bool has_head_ = false;
  faser_head head_ = {};
  const faser_engine* target_ = nullptr;
  const float *fc_bias_ = nullptr, *hidden_norm_ = nullptr, *token_norm_ = nullptr;
  std::vector<const float*> fc_norms_;  // of norm_stride_ values
  int norm_stride_ = 0;
  int feature_pairs_ = 0;
  char *x_features_ = nullptr, *x_head_ = nullptr;  // inputs of fc, and of qkv or input_proj
  float* outputs_ = nullptr;

  // For Medusa heads: x_features_ and places_ by entry of HeadRows; outputs_ of the residual blocks, by row.
  bool has_medusa_ = false;
  faser_medusa medusa_ = {};
  std::vector<int32_t> places_;   // number of drafts after the last committed token
  std::vector<int32_t> entries_;  // 0, 1, 2 ..., for a pass that keeps nothing
  std::vector<faser::MedusaRun> runs_;

  // For a block drafter; x_features_ and hidden_norm_ as for a head.
  faser_block block_ = {};
  std::vector<int32_t> causal_;  // by layer
  std::unique_ptr<faser::BlockMemory> memory_of_blocks_;
  std::vector<faser_conv> attention_convs_, mlp_convs_;
  char* x_markov_ = nullptr;
  float *markov_rows_ = nullptr, *markov_logits_ = nullptr;
  float* selector_rows_ = nullptr;                                      // by row of logits
  float *values_ = nullptr, *deltas_ = nullptr, *convolved_ = nullptr;  // of convolutions, by row
  int delta_stride_ = 0, selector_stride_ = 0;

  faser_experts experts_ = {};  // num_experts 0: all layers are dense
  faser::ExpertPairs pairs_;

  // The hidden rows are the output of the layers before next_layer_; -1: there are no rows.
  int next_layer_ = -1;
  int num_hidden_rows_ = 0;
};

template <typename Body>
void faser_engine::run_timed(int num_rows, int64_t work, int num_parts, Body&& body) {
  // With fewer multiply-adds per worker, a second worker saves less than a barrier costs.
  constexpr int64_t kMinWorkPerThread = 100'000;
  const int64_t useful_threads = work / num_parts / kMinWorkPerThread;
  const int team_size = static_cast<int>(std::clamp<int64_t>(useful_threads, 1, pool_->num_threads()));
  faser::TeamChooser& chooser = faser::TeamChooser::of_size(pool_choosers_->passes, faser::log2_of(num_rows));
  const bool use_team = team_size > 1 && (always_team_ || chooser.use_team());
  const auto start = std::chrono::steady_clock::now();
  pool_->run_team(use_team ? team_size : 1, body);
  if (team_size > 1) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    chooser.record(use_team, elapsed.count() / static_cast<double>(work));
  }
}

#endif  // FASER_ENGINE_H_
