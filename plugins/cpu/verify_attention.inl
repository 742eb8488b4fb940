namespace faser {
namespace {

constexpr int kChunkPages = kChunkTokens / kPageTokens;
constexpr int kPagePairs = kPageTokens / 2;

struct alignas(64) AttentionScratch {
  float scores[kTileSize][kChunkTokens];
  Pair probs[kTileSize][kChunkTokens / 2];
  float sums[kTileSize][kMaxHeadDim];
};

// The pages of one chunk of positions, as the block table has them.
struct Chunk {
  int first_page, last_page;
  const uint32_t* keys[kChunkPages];  // by page - first page of the chunk
  const uint32_t* values[kChunkPages];
};

// Scores of Q queries against the 16 keys of a page. Even and odd pairs are summed apart, which halves the chain.
template <int Q>
inline void score_page(const uint32_t* page, int num_pairs, const void* const* queries, float (*scores)[kChunkTokens],
                       int column) {
  for (int v = 0; v < kPageVectors; v++) {
    F even[Q], odd[Q];
    for (int j = 0; j < Q; j++) even[j] = odd[j] = F{};
    const uint32_t* keys = page + v * kLanes;
    for (int i = 0; i < num_pairs; i += 2, keys += 2 * kPageTokens) {
      const Weights k0(load_words(keys)), k1(load_words(keys + kPageTokens));
      for (int j = 0; j < Q; j++) {
        const Pair* query = static_cast<const Pair*>(queries[j]);
        even[j] = dot(even[j], k0, broadcast(query + i));
        odd[j] = dot(odd[j], k1, broadcast(query + i + 1));
      }
    }
    for (int j = 0; j < Q; j++) store(scores[j] + column + v * kLanes, even[j] + odd[j]);
  }
}

template <int Q>
void score_chunk(const Chunk& chunk, int num_pairs, const AttentionTile& tile, AttentionScratch& scratch) {
  for (int page = chunk.first_page; page < chunk.last_page; page++)
    score_page<Q>(chunk.keys[page], num_pairs, tile.queries, scratch.scores, page * kPageTokens);
}

// sums[j] += probs[j] values over whole pairs [first, last) of the chunk, kVectors vectors of columns at a time.
template <int Q, int kVectors>
inline void add_columns(const Chunk& chunk, int padded_dim, int column, int first, int last,
                        AttentionScratch& scratch) {
  F acc[Q][kVectors];
  for (int j = 0; j < Q; j++)
    for (int v = 0; v < kVectors; v++) acc[j][v] = load(scratch.sums[j] + column + v * kLanes);
  for (int pair = first; pair < last;) {
    const int page = pair / kPagePairs;
    const int page_end = (page + 1) * kPagePairs < last ? (page + 1) * kPagePairs : last;
    const uint32_t* values = chunk.values[page] + static_cast<size_t>(pair % kPagePairs) * padded_dim + column;
    for (; pair < page_end; pair++, values += padded_dim) {
      for (int v = 0; v < kVectors; v++) {
        const Weights weights(load_words(values + v * kLanes));
        for (int j = 0; j < Q; j++) acc[j][v] = dot(acc[j][v], weights, broadcast(scratch.probs[j] + pair));
      }
    }
  }
  for (int j = 0; j < Q; j++)
    for (int v = 0; v < kVectors; v++) store(scratch.sums[j] + column + v * kLanes, acc[j][v]);
}

template <int Q>
void add_values(const Chunk& chunk, int padded_dim, int first, int last, AttentionScratch& scratch) {
  constexpr int kStep = kColumnVectors * kLanes;
  int column = 0;
  for (; column + kStep <= padded_dim; column += kStep)
    add_columns<Q, kColumnVectors>(chunk, padded_dim, column, first, last, scratch);
  for (; column < padded_dim; column += kLanes) add_columns<Q, 1>(chunk, padded_dim, column, first, last, scratch);
}

// sums += prob values of one pair, of which the mask keeps one or both positions: what is masked may be anything, NaN
// too.
inline void add_pair(const Chunk& chunk, int padded_dim, int pair, uint32_t mask, const Pair* probs, float* sums) {
  const uint32_t* values = chunk.values[pair / kPagePairs] + static_cast<size_t>(pair % kPagePairs) * padded_dim;
  for (int i = 0; i < padded_dim; i += kLanes)
    store(sums + i, dot(load(sums + i), Weights(load_words(values + i) & mask), broadcast(probs + pair)));
}

// Positions of a chunk that one query sees, relative to the chunk.
struct Visible {
  int begin, end;

  bool empty() const { return begin >= end; }
  int first_whole_pair() const { return (begin + 1) / 2; }
  int last_whole_pair() const { return end / 2; }
};

// Adds pairs [first, last) of one query, a half-visible pair at either end of what it sees included.
inline void add_own_pairs(const Chunk& chunk, int padded_dim, Visible seen, int first, int last, const Pair* probs,
                          float* sums) {
  for (int pair = first; pair < last; pair++) {
    uint32_t mask = 0xffffffffu;
    if (2 * pair < seen.begin) mask &= 0xffff0000u;
    if (2 * pair + 2 > seen.end) mask &= 0x0000ffffu;
    add_pair(chunk, padded_dim, pair, mask, probs, sums);
  }
}

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

template <int Q>
void attend(const HeadShape& shape, const KvLayer& kv, const AttentionTile& tile, AttentionScratch& scratch) {
  const int padded_dim = shape.padded_dim;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.head_dim));
  const int pages_per_block = kv.tokens_per_block / kPageTokens;
  int begin = tile.begin[0], end = tile.end[0];
  for (int j = 1; j < Q; j++) {
    begin = tile.begin[j] < begin ? tile.begin[j] : begin;
    end = tile.end[j] > end ? tile.end[j] : end;
  }
  Softmax softmax[Q];
  for (int j = 0; j < Q; j++)
    for (int i = 0; i < padded_dim; i++) scratch.sums[j][i] = 0;

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
    score_chunk<Q>(chunk, padded_dim / 2, tile, scratch);

    Visible seen[Q];
    int shared_first = 0, shared_last = kChunkTokens / 2;
    for (int j = 0; j < Q; j++) {
      seen[j].begin = tile.begin[j] > start ? tile.begin[j] - start : 0;
      seen[j].end = tile.end[j] < stop ? tile.end[j] - start : stop - start;
      if (seen[j].empty()) {
        shared_last = 0;
        continue;
      }
      update_softmax(seen[j], scale, scratch.scores[j], scratch.probs[j], scratch.sums[j], padded_dim, softmax[j]);
      if (seen[j].first_whole_pair() > shared_first) shared_first = seen[j].first_whole_pair();
      if (seen[j].last_whole_pair() < shared_last) shared_last = seen[j].last_whole_pair();
    }
    // Each query adds its pairs in order; where all see the same pairs, they add them together.
    const bool is_shared = shared_first < shared_last;
    for (int j = 0; j < Q; j++)
      if (!seen[j].empty())
        add_own_pairs(chunk, padded_dim, seen[j], seen[j].begin / 2, is_shared ? shared_first : (seen[j].end + 1) / 2,
                      scratch.probs[j], scratch.sums[j]);
    if (!is_shared) continue;
    add_values<Q>(chunk, padded_dim, shared_first, shared_last, scratch);
    for (int j = 0; j < Q; j++)
      add_own_pairs(chunk, padded_dim, seen[j], shared_last, (seen[j].end + 1) / 2, scratch.probs[j], scratch.sums[j]);
  }

  for (int j = 0; j < Q; j++) {
    const F factor = F{} + 1.0f / softmax[j].sum;
    alignas(64) Pair out[kMaxHeadDim / 2];
    for (int i = 0; i < padded_dim; i += kLanes) store_pairs(load(scratch.sums[j] + i) * factor, out + i / 2);
    __builtin_memcpy(tile.outputs[j], out, sizeof(Pair) * (shape.head_dim / 2));
  }
}

void verify_attention(const HeadShape& shape, const KvLayer& kv, const AttentionTile& tile, void* scratch) {
  AttentionScratch& s = *static_cast<AttentionScratch*>(scratch);
  switch (tile.num_queries) {
    case 1:
      return attend<1>(shape, kv, tile, s);
    case 2:
      return attend<2>(shape, kv, tile, s);
    case 3:
      return attend<3>(shape, kv, tile, s);
    case 4:
      return attend<4>(shape, kv, tile, s);
  }
  if constexpr (kTileSize > 4) {
    switch (tile.num_queries) {
      case 5:
        return attend<5>(shape, kv, tile, s);
      case 6:
        return attend<6>(shape, kv, tile, s);
      case 7:
        return attend<7>(shape, kv, tile, s);
      case 8:
        return attend<8>(shape, kv, tile, s);
    }
  }
}

}  // namespace
}  // namespace faser
