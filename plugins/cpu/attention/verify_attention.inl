// Attention of one tile of queries, chunk by chunk with a running softmax. Chunks begin at multiples of kChunkTokens,
// so that a query's sums do not depend on its neighbors. score_chunk() and add_chunk() come from the including file.
namespace faser {
namespace {

// Running maximum and sum of one query's softmax.
struct Softmax {
  float max = -__builtin_inff();
  float sum = 0;
};

// Turns a query's scores of one chunk into probabilities relative to the running maximum, rescaling what came before.
inline void update_softmax(Visible seen, float scale, float* scores, Pair* probs, float* sums, int padded_dim,
                           Softmax& softmax) {
  const int begin = seen.begin / kPageTokens * kPageTokens;
  const int end = (seen.end + kPageTokens - 1) / kPageTokens * kPageTokens;
  for (int i = begin; i < seen.begin; i++) scores[i] = -__builtin_inff();
  for (int i = seen.end; i < end; i++) scores[i] = -__builtin_inff();
  F max = F{} - __builtin_inff();
  for (int i = begin; i < end; i += kLanes) {
    const F score = load(scores + i);
    max = select(score > max, score, max);
  }
  const float chunk_max = max_of(max) * scale;
  const float new_max = chunk_max > softmax.max ? chunk_max : softmax.max;
  const F decay = exp_of(F{} + (softmax.max - new_max));
  const F minus_max = F{} - new_max, factor = F{} + scale;
  F sum = {};
  for (int i = begin; i < end; i += kLanes) {
    const F prob = exp_of(madd(load(scores + i), factor, minus_max));
    sum += prob;
    store_pairs(prob, probs + i / 2);
  }
  for (int i = 0; i < padded_dim; i += kLanes) store(sums + i, load(sums + i) * decay);
  softmax.sum = softmax.sum * decay[0] + sum_of(sum);
  softmax.max = new_max;
}

void verify_attention(const HeadShape& shape, const KvLayer& kv, const AttentionTile& tile, void* memory) {
  AttentionScratch& scratch = *static_cast<AttentionScratch*>(memory);
  const int padded_dim = shape.padded_dim, num_queries = tile.num_queries;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.head_dim));
  const int pages_per_block = kv.tokens_per_block / kPageTokens;
  int begin = tile.begin[0], end = tile.end[0];
  for (int j = 1; j < num_queries; j++) {
    begin = tile.begin[j] < begin ? tile.begin[j] : begin;
    end = tile.end[j] > end ? tile.end[j] : end;
  }
  const AttentionScope scope(tile, padded_dim, scratch);
  Softmax softmax[kTileSize];
  for (int j = 0; j < num_queries; j++) {
    if (tile.has_sinks) softmax[j] = {tile.sinks[j], 1.0f};
    for (int i = 0; i < padded_dim; i++) scratch.sums[j][i] = 0;
  }

  for (int start = begin / kChunkTokens * kChunkTokens; start < end; start += kChunkTokens) {
    const int stop = end < start + kChunkTokens ? end : start + kChunkTokens;
    Chunk chunk;
    chunk.first_page = begin > start ? (begin - start) / kPageTokens : 0;
    chunk.last_page = (stop - start + kPageTokens - 1) / kPageTokens;
    for (int page = chunk.first_page; page < chunk.last_page; page++) {
      const int absolute = start / kPageTokens + page, within = absolute % pages_per_block;
      const uint32_t* block = kv.base + tile.blocks[absolute / pages_per_block] * kv.block_stride +
                              static_cast<size_t>(tile.kv_head) * kv.head_stride;
      const size_t page_words = static_cast<size_t>(padded_dim / 2) * kPageTokens;
      chunk.keys[page] = block + within * page_words;
      chunk.values[page] = block + kv.value_offset + within * page_words;
    }
    score_chunk(chunk, padded_dim / 2, tile, scratch);
    Visible seen[kTileSize];
    for (int j = 0; j < num_queries; j++) {
      seen[j].begin = tile.begin[j] > start ? tile.begin[j] - start : 0;
      seen[j].end = tile.end[j] < stop ? tile.end[j] - start : stop - start;
      if (!seen[j].empty())
        update_softmax(seen[j], scale, scratch.scores[j], scratch.probs[j], scratch.sums[j], padded_dim, softmax[j]);
    }
    add_chunk(chunk, padded_dim, num_queries, seen, scratch);
  }

  for (int j = 0; j < num_queries; j++) {
    const F factor = F{} + 1.0f / softmax[j].sum;
    alignas(64) Pair out[kMaxHeadDim / 2];
    for (int i = 0; i < padded_dim; i += kLanes) store_pairs(load(scratch.sums[j] + i) * factor, out + i / 2);
    __builtin_memcpy(tile.outputs[j], out, sizeof(Pair) * (shape.head_dim / 2));
  }
}

}  // namespace
}  // namespace faser
