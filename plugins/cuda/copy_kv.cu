// Copies tokens between blocks of a paged cache, in all planes (keys or values of a layer) at once.
//
// A block of threads per copy, plane and head, whose tokens are contiguous. A copy must not write a token that another
// reads or writes.
//
// limits: registers <= 40, spill_bytes <= 0, shared_bytes <= 0
#include "common.cuh"

namespace faser {

constexpr int kCopyKvThreads = 128;

}  // namespace faser

// copies [4, num_copies]: source block, target block, first offset and end offset; copies out of range do nothing.
// cache [num_planes, num_blocks, num_heads, tokens_per_block] rows of row_bytes, a multiple of 16. Grid (num_copies,
// num_planes * num_heads).
extern "C" __global__ void __launch_bounds__(faser::kCopyKvThreads)
    copy_kv(const int32_t* copies, int32_t num_copies, int32_t num_planes, int32_t num_blocks, int32_t num_heads,
            int32_t tokens_per_block, int32_t row_bytes, char* cache) {
  const int32_t copy = blockIdx.x, plane = static_cast<int32_t>(blockIdx.y) / num_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.y) % num_heads;
  if (copy >= num_copies || plane >= num_planes) return;
  const int32_t from = copies[copy], to = copies[num_copies + copy];
  const int32_t first = copies[2 * num_copies + copy], end = copies[3 * num_copies + copy];
  if (from < 0 || from >= num_blocks || to < 0 || to >= num_blocks) return;
  if (first < 0 || first >= end || end > tokens_per_block) return;
  const auto tokens_of = [&](int32_t block) {
    const int64_t rows = (static_cast<int64_t>(plane) * num_blocks + block) * num_heads + head;
    return reinterpret_cast<uint4*>(cache + (rows * tokens_per_block + first) * row_bytes);
  };
  const uint4* source = tokens_of(from);
  uint4* target = tokens_of(to);
  const int64_t num_words = static_cast<int64_t>(end - first) * (row_bytes / 16);
  for (int64_t i = threadIdx.x; i < num_words; i += faser::kCopyKvThreads) target[i] = source[i];
}
