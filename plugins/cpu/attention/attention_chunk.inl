// Shared by attention_vectors.inl and attention_tiles.inl: a chunk of positions and its masked ends.
namespace faser {
namespace {

constexpr int kChunkPages = kChunkTokens / kPageTokens;
constexpr int kPagePairs = kPageTokens / 2;

struct alignas(64) AttentionScratch {
  Pair queries[kTileSize][kMaxHeadDim / 2];
  float scores[kTileSize][kChunkTokens];
  Pair probs[kTileSize][kChunkTokens / 2];
  float sums[kTileSize][kMaxHeadDim];
};

// The pages of one chunk of positions, from the block table.
struct Chunk {
  int first_page, last_page;
  const uint32_t* keys[kChunkPages];  // by page - first page of the chunk
  const uint32_t* values[kChunkPages];
};

// Adds prob values of one pair, of which the mask keeps one or both positions: masked values may be anything, even
// NaN.
inline void add_pair(const Chunk& chunk, int padded_dim, int pair, uint32_t mask, const Pair* probs, float* sums) {
  const uint32_t* values = chunk.values[pair / kPagePairs] + static_cast<size_t>(pair % kPagePairs) * padded_dim;
  for (int i = 0; i < padded_dim; i += kLanes)
    store(sums + i, dot(load(sums + i), load_words(values + i) & mask, probs + pair));
}

// The positions of a chunk that one query attends to, relative to the chunk.
struct Visible {
  int begin, end;

  bool empty() const { return begin >= end; }
  // Groups of `size` positions that are visible as a whole: [first_whole, last_whole).
  int first_whole(int size) const { return (begin + size - 1) / size; }
  int last_whole(int size) const { return end / size; }
};

// Adds pairs [first, last) of one query, including a half-visible pair at either end.
inline void add_own_pairs(const Chunk& chunk, int padded_dim, Visible seen, int first, int last, const Pair* probs,
                          float* sums) {
  for (int pair = first; pair < last; pair++) {
    uint32_t mask = 0xffffffffu;
    if (2 * pair < seen.begin) mask &= 0xffff0000u;
    if (2 * pair + 2 > seen.end) mask &= 0x0000ffffu;
    add_pair(chunk, padded_dim, pair, mask, probs, sums);
  }
}

}  // namespace
}  // namespace faser
