// Scores and weighted values with vectors: each register of keys or values is used for all queries of the tile.
namespace faser {
namespace {

// Vector instructions need no setup.
struct AttentionScope {
  AttentionScope(const AttentionTile&, int, AttentionScratch&) {}
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
      const U k0 = load_words(keys), k1 = load_words(keys + kPageTokens);
      for (int j = 0; j < Q; j++) {
        const Pair* query = static_cast<const Pair*>(queries[j]);
        even[j] = dot(even[j], k0, query + i);
        odd[j] = dot(odd[j], k1, query + i + 1);
      }
    }
    for (int j = 0; j < Q; j++) store(scores[j] + column + v * kLanes, even[j] + odd[j]);
  }
}

// A page has as many lines as a key has pairs; blocks are not contiguous, so the hardware does not prefetch them.
inline void fetch_page(const uint32_t* page, int num_pairs) {
  for (int i = 0; i < num_pairs; i++) fetch(page + i * kPageTokens);
}

// Values are fetched while keys are scored, and keys two pages ahead.
template <int Q>
void score_pages(const Chunk& chunk, int num_pairs, const AttentionTile& tile, AttentionScratch& scratch) {
  for (int page = chunk.first_page; page < chunk.last_page; page++) {
    fetch_page(chunk.values[page], num_pairs);
    if (page + 2 < chunk.last_page) fetch_page(chunk.keys[page + 2], num_pairs);
    score_page<Q>(chunk.keys[page], num_pairs, tile.queries, scratch.scores, page * kPageTokens);
  }
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
    for (; pair < page_end; pair++, values += padded_dim)
      add_products<Q, kVectors>(
          acc, [&](auto part, int v) { return weights_part<part.value>(load_words(values + v * kLanes)); },
          [&](auto part, int j) { return input_part<part.value>(scratch.probs[j] + pair); });
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

inline void score_chunk(const Chunk& chunk, int num_pairs, const AttentionTile& tile, AttentionScratch& scratch) {
  with_count<kTileSize>(tile.num_queries,
                        [&](auto count) { score_pages<count.value>(chunk, num_pairs, tile, scratch); });
}

// Each query adds its pairs in order; whole pairs that are visible to all queries are added for all together.
inline void add_chunk(const Chunk& chunk, int padded_dim, int num_queries, const Visible* seen,
                      AttentionScratch& scratch) {
  int first = 0, last = kChunkTokens / 2;
  for (int j = 0; j < num_queries; j++) {
    if (seen[j].empty()) last = 0;
    if (seen[j].first_whole(2) > first) first = seen[j].first_whole(2);
    if (seen[j].last_whole(2) < last) last = seen[j].last_whole(2);
  }
  const bool is_shared = first < last;
  for (int j = 0; j < num_queries; j++)
    if (!seen[j].empty())
      add_own_pairs(chunk, padded_dim, seen[j], seen[j].begin / 2, is_shared ? first : (seen[j].end + 1) / 2,
                    scratch.probs[j], scratch.sums[j]);
  if (!is_shared) return;
  with_count<kTileSize>(num_queries,
                        [&](auto count) { add_values<count.value>(chunk, padded_dim, first, last, scratch); });
  for (int j = 0; j < num_queries; j++)
    add_own_pairs(chunk, padded_dim, seen[j], last, (seen[j].end + 1) / 2, scratch.probs[j], scratch.sums[j]);
}

}  // namespace
}  // namespace faser
