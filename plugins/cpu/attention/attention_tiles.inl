// Scores and weighted values with AMX tiles: up to 16 queries at once.
namespace faser {
namespace {

constexpr int kValuePairs = kPagePairs;  // pairs of positions in one tile of values: one page, whatever the block size

// Tiles 0 to 3 accumulate, 4 holds queries, 5 keys, 6 probabilities and 7 values of one page.
class AttentionScope {
 public:
  AttentionScope(const AttentionTile& tile, int padded_dim, AttentionScratch& scratch) {
    TileConfig config;
    config.row_bytes[6] = kValuePairs * sizeof(Pair);
    config.num_rows[7] = kValuePairs;
    _tile_loadconfig(&config);
    for (int j = 0; j < tile.num_queries; j++)
      __builtin_memcpy(scratch.queries[j], tile.queries[j], sizeof(Pair) * (padded_dim / 2));
  }
  ~AttentionScope() { _tile_release(); }
};

constexpr int kQueryBytes = sizeof(Pair) * kMaxHeadDim / 2;
constexpr int kScoreBytes = sizeof(float) * kChunkTokens;
constexpr int kProbBytes = sizeof(Pair) * kChunkTokens / 2;
constexpr int kSumBytes = sizeof(float) * kMaxHeadDim;
constexpr int kPageBytes = sizeof(uint32_t) * kPageTokens;

// num_pairs is a multiple of 16.
inline void score_chunk(const Chunk& chunk, int num_pairs, const AttentionTile&, AttentionScratch& scratch) {
  int page = chunk.first_page;
  for (; page + 4 <= chunk.last_page; page += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < num_pairs; i += kTilePairs) {
      const int offset = i * kPageTokens;
      _tile_loadd(4, scratch.queries[0] + i, kQueryBytes);
      _tile_loadd(5, chunk.keys[page] + offset, kPageBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, chunk.keys[page + 1] + offset, kPageBytes);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, chunk.keys[page + 2] + offset, kPageBytes);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, chunk.keys[page + 3] + offset, kPageBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* scores = scratch.scores[0] + page * kPageTokens;
    _tile_stored(0, scores, kScoreBytes);
    _tile_stored(1, scores + kPageTokens, kScoreBytes);
    _tile_stored(2, scores + 2 * kPageTokens, kScoreBytes);
    _tile_stored(3, scores + 3 * kPageTokens, kScoreBytes);
  }
  for (; page < chunk.last_page; page++) {
    _tile_zero(0);
    for (int i = 0; i < num_pairs; i += kTilePairs) {
      _tile_loadd(4, scratch.queries[0] + i, kQueryBytes);
      _tile_loadd(5, chunk.keys[page] + i * kPageTokens, kPageBytes);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scratch.scores[0] + page * kPageTokens, kScoreBytes);
  }
}

// to [16][kMaxHeadDim] = sums + probs times values of pages [first, last).
inline void add_pages(const Chunk& chunk, int padded_dim, int first, int last, const AttentionScratch& scratch,
                      float* to) {
  const int value_bytes = padded_dim * static_cast<int>(sizeof(uint32_t));
  int column = 0;
  for (; column + 64 <= padded_dim; column += 64) {
    const float* from = scratch.sums[0] + column;
    _tile_loadd(0, from, kSumBytes);
    _tile_loadd(1, from + 16, kSumBytes);
    _tile_loadd(2, from + 32, kSumBytes);
    _tile_loadd(3, from + 48, kSumBytes);
    for (int page = first; page < last; page++) {
      const uint32_t* values = chunk.values[page] + column;
      _tile_loadd(6, scratch.probs[0] + page * kPagePairs, kProbBytes);
      _tile_loadd(7, values, value_bytes);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, values + 16, value_bytes);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, values + 32, value_bytes);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, values + 48, value_bytes);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, to + column, kSumBytes);
    _tile_stored(1, to + column + 16, kSumBytes);
    _tile_stored(2, to + column + 32, kSumBytes);
    _tile_stored(3, to + column + 48, kSumBytes);
  }
  for (; column < padded_dim; column += 16) {
    _tile_loadd(0, scratch.sums[0] + column, kSumBytes);
    for (int page = first; page < last; page++) {
      _tile_loadd(6, scratch.probs[0] + page * kPagePairs, kProbBytes);
      _tile_loadd(7, chunk.values[page] + column, value_bytes);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, to + column, kSumBytes);
  }
}

// Adds one page for the queries that attend to all of it. The others get garbage, maybe NaN, and keep their old sums.
inline void add_page_where_whole(const Chunk& chunk, int padded_dim, int num_queries, const Visible* seen, int page,
                                 AttentionScratch& scratch) {
  alignas(64) float sums[kTileSize][kMaxHeadDim];
  add_pages(chunk, padded_dim, page, page + 1, scratch, sums[0]);
  for (int j = 0; j < num_queries; j++)
    if (seen[j].first_whole(kPageTokens) <= page && page < seen[j].last_whole(kPageTokens))
      __builtin_memcpy(scratch.sums[j], sums[j], sizeof(float) * padded_dim);
}

// Each query adds the page where its range begins, then its whole pages by tiles, then the page where its range ends.
inline void add_chunk(const Chunk& chunk, int padded_dim, int num_queries, const Visible* seen,
                      AttentionScratch& scratch) {
  // The pages that some query attends to as a whole, and among them those that all queries do.
  int first = kChunkPages, last = 0, shared_first = 0, shared_last = kChunkPages;
  for (int j = 0; j < num_queries; j++) {
    const int whole_first = seen[j].first_whole(kPageTokens), whole_last = seen[j].last_whole(kPageTokens);
    if (seen[j].empty() || whole_first >= whole_last) {
      shared_last = 0;
    } else {
      first = whole_first < first ? whole_first : first;
      last = whole_last > last ? whole_last : last;
      shared_first = whole_first > shared_first ? whole_first : shared_first;
      shared_last = whole_last < shared_last ? whole_last : shared_last;
    }
    if (seen[j].empty()) continue;
    const int end_pair = (seen[j].end + 1) / 2, whole_pair = whole_first * kPagePairs;
    add_own_pairs(chunk, padded_dim, seen[j], seen[j].begin / 2, whole_pair < end_pair ? whole_pair : end_pair,
                  scratch.probs[j], scratch.sums[j]);
  }
  if (shared_first >= shared_last) shared_first = shared_last = last;
  for (int page = first; page < shared_first; page++)
    add_page_where_whole(chunk, padded_dim, num_queries, seen, page, scratch);
  if (shared_first < shared_last) add_pages(chunk, padded_dim, shared_first, shared_last, scratch, scratch.sums[0]);
  for (int page = shared_last; page < last; page++)
    add_page_where_whole(chunk, padded_dim, num_queries, seen, page, scratch);
  for (int j = 0; j < num_queries; j++) {
    const int whole_last = seen[j].last_whole(kPageTokens);
    if (seen[j].empty() || whole_last < seen[j].first_whole(kPageTokens)) continue;
    add_own_pairs(chunk, padded_dim, seen[j], whole_last * kPagePairs, (seen[j].end + 1) / 2, scratch.probs[j],
                  scratch.sums[j]);
  }
}

}  // namespace
}  // namespace faser
