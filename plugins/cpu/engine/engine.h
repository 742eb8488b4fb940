// The engine: one model, its KV memory and workspaces.
#ifndef FASER_ENGINE_H_
#define FASER_ENGINE_H_

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

// Of a packed matrix: words of a column, and panels.
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
  const float *input_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm, *gate_up_bias, *down_bias;
};

// Measurements of one pool.
struct PoolChoosers {
  const faser_pool* pool;
  TeamChooser passes[32], exits[32];  // by log2 of the number of rows
};

// Rows of a head whose outputs are kept by entry; continues: these rows' features are what is kept of the same entries.
struct HeadRows {
  const int32_t *rows, *entries;
  int count;
  bool continues;
};

// Rows with logits that one Medusa head computes.
struct MedusaRun {
  int head, first, count;
};

// The values of a row of pairs, which are bf16 numbers or floats that hold such.
void read_pairs(const char* x, int size, size_t pair_bytes, float* values);

// KV of a row that a branch of its request needs too.
struct BranchRow {
  int row, block, offset;
};

// A tile of attention before the layer is known.
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

  // kept: of a head only; without it Medusa heads give the first drafts' logits.
  int32_t forward(const faser_batch& batch, int first_layer, int last_layer, const int32_t* logit_rows,
                  int num_logit_rows, float* logits, const faser::HeadRows* kept = nullptr);
  int32_t attach(faser_engine* target, const int32_t* layers, int num_layers);  // throws std::bad_alloc
  bool is_head() const { return has_head_ || has_medusa_; }
  bool is_mtp() const { return has_head_ && head_.fc == nullptr; }
  int32_t compact_rows(const int32_t* rows, int num_rows);
  int32_t early_exit(const int32_t* rows, int num_rows, const int32_t* candidates, int num_candidates, float* scores);
  int32_t hidden_rows(int num_rows, float* hidden) const;
  int32_t copy_kv(int num_copies, const int32_t* from, const int32_t* to, const int32_t* first, const int32_t* end);
  void set_pool(faser_pool* pool);  // throws std::bad_alloc, and then nothing has changed
  int num_layers() const { return model_.num_layers; }
  int vocab_size() const { return model_.vocab_size; }
  int64_t memory_bytes() const { return num_bytes_; }
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
  void begin_rows(const faser::Team& team, const faser_batch& batch, bool embed);
  void run_layer(const faser::Team& team, const faser_batch& batch, int layer);
  void finish_layer(const faser::Team& team, const faser_batch& batch, int layer);  // behind its qkv
  void capture_rows(const faser::Team& team, const faser_batch& batch, int layer);
  void run_head_layer(const faser::Team& team, const faser_batch& batch, const faser::HeadRows* kept);
  void keep_outputs(const faser::Team& team, const faser::HeadRows& kept);
  void gather_features(const faser_batch& batch, int row, char* x) const;
  void plan_medusa(const faser::HeadRows& kept, int num_logit_rows);
  void run_medusa(const faser::Team& team, const faser_batch& batch, const faser::HeadRows& kept, int num_logit_rows,
                  float* logits);
  void spread_logits(const faser::Team& team, int num_logit_rows, float* logits) const;
  void attend(const faser::Team& team, const faser_batch& batch, int layer);
  void run_head(const faser::Team& team, const int32_t* logit_rows, int num_logit_rows, float* logits);
  // next: the matrix that they meet. Workers meet behind either.
  void norm_rows(const faser::Team& team, int num_rows, const int32_t* rows, const float* weight,
                 const faser::Matrix& next);
  void quantize_rows(const faser::Team& team, int num_rows, const faser::Matrix& next, const char* x, int x_stride);
  faser::Gemm product(const faser::Matrix& weights, const float* bias, const char* x, int x_stride, int num_rows) const;
  faser::KvLayer kv_layer(int layer) const;
  // Where a request's position lies among num_blocks * tokens_per_block.
  size_t token_index(const faser_batch& batch, int request, int position) const {
    const size_t row = static_cast<size_t>(batch.slots[request]) * batch.max_blocks_per_seq;
    const int block = batch.block_table[row + position / tokens_per_block_];
    return static_cast<size_t>(block) * tokens_per_block_ + position % tokens_per_block_;
  }
  faser::Matrix layer_matrix(const uint32_t* words, const float* scales, int num_in) const {
    return {words, scales, model_.weight_bits, model_.group_size, faser::num_pairs(num_in), model_.activation_bits};
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
  uint32_t* kv_;
  size_t kv_layer_words_, kv_head_words_;
  float *hidden_, *qkv_, *cos_, *sin_;
  char *x_hidden_, *queries_, *x_attention_, *x_mlp_;
  uint32_t* x_bytes_ = nullptr;    // with activation_bits 8: of those three what the next product takes
  int bytes_stride_ = 0;           // words
  int32_t* row_requests_;          // [max_num_tokens] request of each row
  std::vector<char*> scratch_;     // per worker
  std::vector<float*> exit_rows_;  // per worker: one row of early exit and one output's weights
  std::vector<faser::TileRange> tiles_;
  std::vector<faser::BranchRow> branch_rows_;  // by row
  faser::Counter tile_counters_[2];            // by parity of the layer: one is in use while the other is reset

  const bool always_team_;                                      // FASER_CPU_TEAM=always
  std::vector<std::unique_ptr<faser::PoolChoosers>> choosers_;  // of recent pools, newest last
  faser::PoolChoosers* pool_choosers_ = nullptr;                // of pool_

  // A target's, for its head: [num_blocks, tokens_per_block] rows of pairs, the captured layers side by side.
  std::vector<int32_t> captured_layers_;
  char* captured_ = nullptr;
  char* x_normed_ = nullptr;  // for heads that read rows behind the final norm

  // A head's.
  bool has_head_ = false;
  faser_head head_ = {};
  const faser_engine* target_ = nullptr;
  const float *fc_bias_ = nullptr, *hidden_norm_ = nullptr, *token_norm_ = nullptr;
  int feature_pairs_ = 0;
  char *x_features_ = nullptr, *x_head_ = nullptr;  // inputs of fc, and of qkv or input_proj
  float *outputs_ = nullptr, *draft_logits_ = nullptr;

  // Medusa heads': x_features_ and places_ are by entry of HeadRows, outputs_ what the residual blocks add, by row.
  bool has_medusa_ = false;
  faser_medusa medusa_ = {};
  std::vector<int32_t> places_;   // drafts behind the last committed token
  std::vector<int32_t> entries_;  // 0, 1, 2 ..., for a pass that keeps nothing
  std::vector<faser::MedusaRun> runs_;

  // The hidden rows are the output of the layers before next_layer_; -1: there are none.
  int next_layer_ = -1;
  int num_hidden_rows_ = 0;
};

#endif  // FASER_ENGINE_H_
