// Packs a batch's sampling entries and their data for one upload; ops/transfer/pack_sampling.py computes the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "faser_cpu.h"

namespace faser {
namespace {

constexpr int64_t kIntBytes = 4;
constexpr int64_t kEntryInts = sizeof(faser_sampling) / kIntBytes;

// True if the next token's distribution depends on the tokens before it.
bool needs_history(const faser_sampling& s) {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f ||
         s.num_bad_words > 0;
}

// Memory whose size is counted, and which is filled as far as it exists.
class Block {
 public:
  Block(uint64_t base, int32_t* out, int64_t capacity, int64_t size)
      : base_(base), out_(out), capacity_(capacity), size_(size) {}

  // Appends `bytes` bytes, padded to whole numbers, and returns their address there.
  uint64_t add(const void* piece, int64_t bytes) {
    const uint64_t address = base_ + static_cast<uint64_t>(kIntBytes * size_);
    const int64_t count = (bytes + kIntBytes - 1) / kIntBytes;
    if (bytes > 0 && size_ + count <= capacity_) {
      out_[size_ + count - 1] = 0;
      std::memcpy(out_ + size_, piece, static_cast<size_t>(bytes));
    }
    size_ += count;
    return address;
  }

  int32_t* last() { return size_ <= capacity_ ? out_ + size_ - 1 : nullptr; }
  int64_t size() const { return size_; }

 private:
  uint64_t base_;
  int32_t* out_;
  int64_t capacity_, size_;
};

template <typename T>
void point(T*& field, uint64_t address) {
  field = reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void add_lists(Block& block, const faser_sampling& s, faser_sampling& entry) {
  if (entry.num_end_ids > 0) point(entry.end_ids, block.add(s.end_ids, kIntBytes * s.num_end_ids));
  if (s.num_bias > 0) {
    point(entry.bias_ids, block.add(s.bias_ids, kIntBytes * s.num_bias));
    point(entry.bias_values, block.add(s.bias_values, kIntBytes * s.num_bias));
  }
  if (s.num_bad_words > 0) {
    point(entry.cu_bad_words, block.add(s.cu_bad_words, kIntBytes * (s.num_bad_words + 1)));
    point(entry.bad_words, block.add(s.bad_words, kIntBytes * s.cu_bad_words[s.num_bad_words]));
  }
}

// Packs masks of num_rows positions from num_tokens on, each at index position % num_rows.
void add_masks(Block& block, const faser_sampling& s, int32_t num_tokens, int32_t num_rows, int32_t num_words,
               faser_sampling& entry) {
  entry.num_mask_rows = num_rows;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int32_t position = num_tokens + ((row - num_tokens) % num_rows + num_rows) % num_rows;
    const uint32_t* mask = s.masks + static_cast<size_t>(position % s.num_mask_rows) * static_cast<size_t>(num_words);
    const uint64_t address = block.add(mask, kIntBytes * num_words);
    if (row == 0) point(entry.masks, address);
  }
}

// Copies an entry without what only the host uses, and without end ids once they are no longer banned.
faser_sampling bare(const faser_sampling& s, int32_t num_tokens) {
  faser_sampling entry = s;
  entry.draft_probs = entry.draft_margins = nullptr;
  entry.draft_candidates = entry.draft_runners_up = nullptr;
  entry.draft_sources = nullptr;
  entry.end_ids = entry.bias_ids = entry.bad_words = entry.cu_bad_words = nullptr;
  entry.bias_values = nullptr;
  entry.masks = nullptr;
  entry.fill_masks = nullptr;
  if (num_tokens - s.prompt_len >= s.min_tokens) entry.num_end_ids = 0;
  return entry;
}

}  // namespace
}  // namespace faser

int64_t faser_pack_sampling(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_rows,
                            const int32_t* branch_tokens, int32_t num_branches, int32_t vocab_size, uint64_t base,
                            uint64_t draft_probs, uint64_t probs_bytes, int32_t* out, int64_t capacity,
                            int32_t* out_is_edited) {
  using faser::kEntryInts;
  using faser::kIntBytes;
  if (num_requests < 0 || num_branches < 0 || num_branches > num_requests || vocab_size <= 0) return FASER_BAD_ARGUMENT;
  const int32_t num_words = (vocab_size + 31) / 32;
  faser::Block block(base, out, capacity, num_requests * kEntryInts);
  bool is_edited = false;
  for (int32_t i = 0; i < num_requests; ++i) {
    const faser_sampling& s = sampling[slots[i]];
    const int32_t known = num_tokens[i], pending = num_drafts[i];
    if (s.tokens == nullptr || known <= 0 || pending < 0) return FASER_BAD_ARGUMENT;
    if (num_rows != nullptr && num_rows[i] == 0) {
      faser_sampling nothing{};
      faser::point(nothing.tokens, base);  // only entries without tokens are refused
      if ((i + 1) * kEntryInts <= capacity) std::memcpy(out + i * kEntryInts, &nothing, sizeof(nothing));
      continue;
    }
    faser_sampling entry = faser::bare(s, known);
    const bool has_history = faser::needs_history(s);
    is_edited |= has_history || s.num_bias > 0 || entry.num_end_ids > 0;

    const int32_t first = has_history ? 0 : known;
    uint64_t at = block.add(s.tokens + first, kIntBytes * (known - first));
    if (i >= num_requests - num_branches && first < known && block.last() != nullptr) {
      *block.last() = branch_tokens[i - (num_requests - num_branches)];
    }
    block.add(s.tokens + known, kIntBytes * pending);
    faser::point(entry.tokens, at - static_cast<uint64_t>(kIntBytes * first));
    faser::add_lists(block, s, entry);
    if (num_rows != nullptr) {
      const int8_t* sources = s.draft_sources == nullptr ? nullptr : s.draft_sources + known;
      if (sources != nullptr && std::any_of(sources, sources + pending, [](int8_t by) { return by != 0; })) {
        faser::point(entry.draft_sources, block.add(sources, pending) - static_cast<uint64_t>(known));
      }
      if (s.masks != nullptr) {
        if (s.num_mask_rows <= 0 || num_rows[i] < 0) return FASER_BAD_ARGUMENT;
        faser::add_masks(block, s, known, num_rows[i], num_words, entry);
        is_edited = true;
      }
    }
    if (draft_probs != 0 && s.mode == FASER_SAMPLED) {
      faser::point(entry.draft_probs, draft_probs + static_cast<uint64_t>(slots[i]) * probs_bytes);
    }
    if ((i + 1) * kEntryInts <= capacity) std::memcpy(out + i * kEntryInts, &entry, sizeof(entry));
  }
  *out_is_edited = is_edited ? 1 : 0;
  return block.size();
}
