#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>

#include "model_check.h"

namespace faser {

#ifdef FASER_HEAP_MEMORY  // so that AddressSanitizer checks the ends of blocks on the heap

Memory::Memory(size_t num_bytes) : num_bytes_(std::max<size_t>(num_bytes, 1)) {
  if (posix_memalign(&data_, 64, num_bytes_) != 0) throw std::bad_alloc();
  std::memset(data_, 0, num_bytes_);
}

Memory::~Memory() { std::free(data_); }

#else

Memory::Memory(size_t num_bytes) : num_bytes_(std::max<size_t>(num_bytes, 1)) {
  data_ = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data_, num_bytes_, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
}

#endif

Memory::Memory(Memory&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) { other.data_ = nullptr; }

}  // namespace faser

using faser::kPanel;
using faser::round_up;

namespace {

constexpr size_t kMaxPools = 16;  // pools whose measurements are kept

bool wants_team_always() {
  const char* value = std::getenv("FASER_CPU_TEAM");
  return value != nullptr && std::strcmp(value, "always") == 0;
}

}  // namespace

template <typename T>
T* faser_engine::allocate(size_t count) {
  memory_.emplace_back(count * sizeof(T));
  num_bytes_ += static_cast<int64_t>(count * sizeof(T));
  return static_cast<T*>(memory_.back().data());
}

char* faser_engine::allocate_bytes(size_t num_bytes) { return allocate<char>(num_bytes); }

const float* faser_engine::padded_copy(const float* source, int size, int multiple) {
  if (source == nullptr) return nullptr;
  float* copy = allocate<float>(round_up(size, multiple));
  std::memcpy(copy, source, sizeof(float) * size);
  return copy;
}

faser_engine::faser_engine(const faser_model& model, faser_pool* pool, int num_blocks, int tokens_per_block,
                           int max_num_tokens, int max_num_requests)
    : kernels_(faser::kernels()),
      pair_bytes_(kernels_.pair_bytes),
      model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      num_blocks_(num_blocks),
      tokens_per_block_(tokens_per_block),
      max_num_tokens_(max_num_tokens),
      max_num_requests_(max_num_requests),
      always_team_(wants_team_always()),
      windows_(model.num_layers) {
  if (model.windows != nullptr) std::copy_n(model.windows, model.num_layers, windows_.begin());
  const auto [least, most] = std::minmax_element(windows_.begin(), windows_.end());
  if (*least > 0) widest_window_ = *most;
  heads_ = {model.num_heads,    model.num_kv_heads,        model.head_dim, round_up(model.head_dim, 32),
            model.rms_norm_eps, model.norms_all_heads != 0};
  const int q_size = model.num_heads * model.head_dim;
  const int qkv_size = q_size + 2 * model.num_kv_heads * model.head_dim;
  hidden_stride_ = round_up(model.hidden_size, kPanel);
  hidden_pairs_ = hidden_stride_ / 2;
  qkv_stride_ = round_up(qkv_size, kPanel);
  query_pairs_ = model.num_heads * heads_.padded_dim / 2;
  attention_pairs_ = round_up(q_size, kPanel) / 2;
  mlp_size_ = round_up(model.intermediate_size, kPanel);
  mlp_pairs_ = mlp_size_ / 2;

  if (model.experts != nullptr) experts_ = *model.experts;
  const bool is_mixture = experts_.num_experts > 0;  // biases of experts are read in place
  pairs_.shared_pairs = round_up(experts_.shared_size, kPanel) / 2;

  memory_.reserve(32 + 9 * static_cast<size_t>(model.num_layers) + 2 * pool->num_threads());
  const int q_norm_size = heads_.norms_all_heads ? q_size : model.head_dim;
  const int k_norm_size = heads_.norms_all_heads ? model.num_kv_heads * model.head_dim : model.head_dim;
  for (const faser_layer& layer : layers_) {
    vectors_.push_back(
        {padded_copy(layer.input_norm, model.hidden_size, kPanel), padded_copy(layer.qkv_bias, qkv_size, kPanel),
         padded_copy(layer.q_norm, q_norm_size, 32), padded_copy(layer.k_norm, k_norm_size, 32),
         padded_copy(layer.o_bias, model.hidden_size, kPanel), padded_copy(layer.post_norm, model.hidden_size, kPanel),
         padded_copy(is_mixture ? nullptr : layer.gate_up_bias, 2 * mlp_size_, kPanel),
         padded_copy(is_mixture ? nullptr : layer.down_bias, model.hidden_size, kPanel),
         padded_copy(layer.router_bias, experts_.num_experts, kPanel)});
  }
  final_norm_ = padded_copy(model.final_norm, model.hidden_size, kPanel);
  if (model.head != nullptr) {
    has_head_ = true;
    head_ = *model.head;
    fc_bias_ = padded_copy(head_.fc_bias, model.hidden_size, kPanel);
    hidden_norm_ = padded_copy(head_.hidden_norm, model.hidden_size, kPanel);
    token_norm_ = padded_copy(head_.token_norm, model.hidden_size, kPanel);
    for (int i = 0; i < head_.num_fc_norms; i++) {
      const int size = head_.num_features / head_.num_fc_norms;
      norm_stride_ = round_up(size, kPanel);
      fc_norms_.push_back(padded_copy(head_.fc_norm + static_cast<size_t>(i) * size, size, kPanel));
    }
  }
  if (model.medusa != nullptr) {
    has_medusa_ = true;
    medusa_ = *model.medusa;
    head_.num_features = model.hidden_size;
  }

  if (model.block != nullptr) {
    block_ = *model.block;
    head_.num_features = block_.num_features;
    causal_.assign(block_.causal, block_.causal + model.num_layers);
    if (block_.conv_taps > 0) {
      attention_convs_.assign(block_.attention_convs, block_.attention_convs + model.num_layers);
      mlp_convs_.assign(block_.mlp_convs, block_.mlp_convs + model.num_layers);
    }
    hidden_norm_ = padded_copy(block_.hidden_norm, model.hidden_size, kPanel);
    const int max_requests = std::min(max_num_requests, max_num_tokens / block_.block_size);
    memory_of_blocks_ =
        std::make_unique<faser::BlockMemory>(max_requests, block_.block_size, model.max_seq_len, tokens_per_block);
    num_blocks += max_requests * memory_of_blocks_->blocks_per_request;
  }

  kv_head_words_ = static_cast<size_t>(tokens_per_block) * heads_.padded_dim;
  kv_layer_words_ = kv_head_words_ * model.num_kv_heads * num_blocks;
  kv_ = allocate<uint32_t>(has_medusa_ ? 0 : kv_layer_words_ * model.num_layers);

  // A Medusa head's rows may begin anywhere among them.
  const size_t num_rows =
      round_up(max_num_tokens, faser::kRowAlignment) + (has_medusa_ ? size_t{faser::kRowAlignment} : 0);
  hidden_ = allocate<float>(num_rows * hidden_stride_);
  qkv_ = allocate<float>(num_rows * qkv_stride_);
  cos_ = allocate<float>(num_rows * (model.head_dim / 2));
  sin_ = allocate<float>(num_rows * (model.head_dim / 2));
  x_hidden_ = allocate<char>(num_rows * hidden_pairs_ * pair_bytes_);
  queries_ = allocate<char>(num_rows * query_pairs_ * pair_bytes_);
  x_attention_ = allocate<char>(num_rows * attention_pairs_ * pair_bytes_);
  x_mlp_ = is_mixture ? nullptr : allocate<char>(num_rows * mlp_pairs_ * pair_bytes_);
  if (model.activation_bits == 8) {
    const int num_inputs = 2 * std::max({hidden_pairs_, attention_pairs_, mlp_pairs_, pairs_.shared_pairs});
    const int words = num_inputs * static_cast<int>(kernels_.byte_size) / static_cast<int>(sizeof(uint32_t));
    bytes_stride_ = round_up(faser::byte_row_header(num_inputs) + words, 16);
    x_bytes_ = allocate<uint32_t>(num_rows * bytes_stride_);
  }
  if (is_mixture) allocate_experts(num_rows);
  row_requests_ = allocate<int32_t>(num_rows);
  if (has_head_) {
    feature_pairs_ = round_up(head_.num_features, kPanel) / 2;
    x_features_ = allocate<char>(num_rows * feature_pairs_ * pair_bytes_);
    x_head_ = allocate<char>(num_rows * 2 * hidden_pairs_ * pair_bytes_);
    outputs_ = allocate<float>(static_cast<size_t>(max_num_requests) * hidden_stride_);
  }
  if (is_block()) {
    feature_pairs_ = round_up(block_.num_features, kPanel) / 2;
    x_features_ = allocate<char>(num_rows * feature_pairs_ * pair_bytes_);
    if (block_.conv_taps > 0) {
      delta_stride_ = round_up(2 * block_.conv_taps * (model.hidden_size / block_.conv_group_size), kPanel);
      deltas_ = allocate<float>(num_rows * delta_stride_);
      values_ = allocate<float>(num_rows * hidden_stride_);
      convolved_ = allocate<float>(num_rows * hidden_stride_);
    }
    if (block_.selector_rank > 0) {
      selector_stride_ = round_up(block_.selector_rank, kPanel);
      selector_rows_ = allocate<float>(num_rows * selector_stride_);
    }
    if (block_.markov_rank > 0) {
      const size_t rows = round_up(max_num_requests, faser::kRowAlignment),
                   stride = faser::num_pairs(block_.markov_rank);
      x_markov_ = allocate<char>(rows * stride * pair_bytes_);
      markov_rows_ = allocate<float>(rows * stride * 2);
      markov_logits_ = allocate<float>(rows * logits_stride());
    }
  }
  output_ids_ = has_head_ ? head_.target_ids : model.output_ids;
  num_outputs_ = model.output_ids != nullptr ? model.num_outputs : model.vocab_size;
  if (has_head_) num_outputs_ = head_.draft_vocab_size;
  if (output_ids_ != nullptr) output_logits_ = allocate<float>(num_rows * round_up(num_outputs_, kPanel));
  if (has_medusa_) {
    x_features_ = allocate<char>(static_cast<size_t>(max_num_requests) * hidden_pairs_ * pair_bytes_);
    outputs_ = allocate<float>(num_rows * hidden_stride_);
    places_.resize(max_num_requests);
    entries_.resize(max_num_requests);
    std::iota(entries_.begin(), entries_.end(), 0);
    runs_.reserve(max_num_requests);
  }
  set_pool(pool);

  const size_t group = model.num_heads / model.num_kv_heads;
  const size_t tiles_per_head = num_rows * group / kernels_.tile_size + max_num_requests + 1;
  tiles_.reserve(tiles_per_head * model.num_kv_heads);
}

faser::KvLayer faser_engine::kv_layer(int layer) const {
  return {kv_ + kv_layer_words_ * layer, kv_head_words_ * heads_.num_kv_heads, kv_head_words_, kv_head_words_ / 2,
          tokens_per_block_};
}

void faser_engine::set_pool(faser_pool* pool) {
  while (static_cast<int>(scratch_.size()) < pool->num_threads())
    scratch_.push_back(allocate<char>(kernels_.scratch_bytes));
  while (worker_rows_.size() < scratch_.size())
    worker_rows_.push_back(allocate<float>(2 * static_cast<size_t>(std::max(hidden_stride_, norm_stride_))));
  const auto is_of_pool = [&](const auto& choosers) { return choosers->pool == pool; };
  auto found = std::find_if(choosers_.begin(), choosers_.end(), is_of_pool);
  if (found == choosers_.end()) {
    choosers_.push_back(std::make_unique<faser::PoolChoosers>());
    choosers_.back()->pool = pool;
    if (choosers_.size() > kMaxPools) choosers_.erase(choosers_.begin());
    found = choosers_.end() - 1;
  }
  pool_ = pool;
  pool_choosers_ = found->get();
}

int32_t faser_engine::copy_kv(int num_copies, const int32_t* from, const int32_t* to, const int32_t* first,
                              const int32_t* end) {
  if (num_copies < 0 || has_medusa_) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_copies; i++) {
    if (from[i] < 0 || from[i] >= num_blocks_ || to[i] < 0 || to[i] >= num_blocks_) return FASER_BAD_BLOCK;
    if (first[i] < 0 || first[i] > end[i] || end[i] > tokens_per_block_) return FASER_BAD_POSITION;
  }
  // Keys are in pages of kPageTokens, values in pairs of tokens, padded_dim words each.
  const size_t page_words = static_cast<size_t>(faser::kPageTokens) * heads_.padded_dim / 2;
  for (int i = 0; i < num_copies; i++) {
    if (first[i] == end[i] || from[i] == to[i]) continue;
    const size_t first_page = first[i] / faser::kPageTokens;
    const size_t num_pages = (end[i] - 1) / faser::kPageTokens - first_page + 1;
    for (int layer = 0; layer < model_.num_layers; layer++) {
      const faser::KvLayer kv = kv_layer(layer);
      for (int head = 0; head < 2 * heads_.num_kv_heads; head++) {  // for each head its keys, then its values
        const size_t at = head / 2 * kv.head_stride + head % 2 * kv.value_offset + first_page * page_words;
        std::memcpy(kv.base + to[i] * kv.block_stride + at, kv.base + from[i] * kv.block_stride + at,
                    sizeof(uint32_t) * num_pages * page_words);
      }
    }
    if (captured_ == nullptr) continue;
    const size_t row_bytes = captured_layers_.size() * static_cast<size_t>(model_.hidden_size / 2) * pair_bytes_;
    const auto row_of = [&](int block) {
      return captured_ + (static_cast<size_t>(block) * tokens_per_block_ + first[i]) * row_bytes;
    };
    std::memcpy(row_of(to[i]), row_of(from[i]), row_bytes * static_cast<size_t>(end[i] - first[i]));
  }
  return FASER_OK;
}

int32_t faser_engine::compact_rows(const int32_t* rows, int num_rows) {
  if (next_layer_ < 0 || num_rows < 0 || num_rows > num_hidden_rows_) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_rows; i++)
    if (rows[i] < (i > 0 ? rows[i - 1] + 1 : 0) || rows[i] >= num_hidden_rows_) return FASER_BAD_ARGUMENT;
  for (int i = 0; i < num_rows; i++)
    if (rows[i] != i)
      std::memcpy(hidden_ + static_cast<size_t>(i) * hidden_stride_,
                  hidden_ + static_cast<size_t>(rows[i]) * hidden_stride_, sizeof(float) * hidden_stride_);
  num_hidden_rows_ = num_rows;
  return FASER_OK;
}

extern "C" {

faser_engine* faser_engine_create(const faser_model* model, faser_pool* pool, int32_t num_blocks,
                                  int32_t tokens_per_block, int32_t max_num_tokens, int32_t max_num_requests,
                                  int32_t* status) {
  *status = FASER_BAD_ARGUMENT;
  if (model == nullptr || pool == nullptr || !faser::is_valid(*model) || num_blocks < 1 || tokens_per_block < 1 ||
      tokens_per_block % faser::kPageTokens != 0 || max_num_tokens < 1 || max_num_requests < 1)
    return nullptr;
  if (model->block != nullptr && model->block->block_size > max_num_tokens) return nullptr;
  try {
    faser_engine* engine =
        new faser_engine(*model, pool, num_blocks, tokens_per_block, max_num_tokens, max_num_requests);
    *status = FASER_OK;
    return engine;
  } catch (const std::exception&) {
    *status = FASER_OUT_OF_MEMORY;
    return nullptr;
  }
}

void faser_engine_destroy(faser_engine* engine) { delete engine; }

int64_t faser_engine_memory_bytes(const faser_engine* engine) { return engine->memory_bytes(); }

double faser_engine_distinct_experts(const faser_engine* engine) { return engine->distinct_experts(); }

int32_t faser_engine_logits_stride(const faser_engine* engine) { return engine->logits_stride(); }

int32_t faser_engine_forward(faser_engine* engine, const faser_batch* batch, int32_t first_layer, int32_t last_layer,
                             const int32_t* logit_rows, int32_t num_logit_rows, float* logits) {
  return engine->forward(*batch, first_layer, last_layer, logit_rows, num_logit_rows, logits);
}

int32_t faser_engine_copy_kv(faser_engine* engine, int32_t num_copies, const int32_t* from, const int32_t* to,
                             const int32_t* first, const int32_t* end) {
  return engine->copy_kv(num_copies, from, to, first, end);
}

int32_t faser_engine_set_pool(faser_engine* engine, faser_pool* pool) {
  if (pool == nullptr) return FASER_BAD_ARGUMENT;
  try {
    engine->set_pool(pool);
    return FASER_OK;
  } catch (const std::exception&) {
    return FASER_OUT_OF_MEMORY;
  }
}

int32_t faser_engine_compact_rows(faser_engine* engine, const int32_t* rows, int32_t num_rows) {
  return engine->compact_rows(rows, num_rows);
}
}
