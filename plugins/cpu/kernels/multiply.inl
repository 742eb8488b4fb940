// Rows times one packed panel with vectors, panel_vectors(R) registers of outputs for R rows at a time.
namespace faser {
namespace {

// Vector kernels need no setup.
struct MultiplyScope {
  MultiplyScope() {}
};

constexpr int kFetchPairs = 32;  // 8 KB ahead: hardware prefetching stops at every page

// out [R][64] += R rows times num_pairs pairs of one panel. Each output is one sum over the pairs in order, for any R.
// Memory is busy while rows are multiplied: it fetches the block after this one or, if one row reads the panel once
// and in order, what comes next.
template <int R>
void multiply_block(const uint32_t* block, int num_pairs, const Pair* x, int x_stride, float (*out)[kPanel]) {
  constexpr int kVectors = panel_vectors(R);
  constexpr bool kReadsWhole = kVectors * kLanes == kPanel;
  for (int first = 0; first < kPanel; first += kVectors * kLanes) {
    F acc[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) acc[r][v] = load(out[r] + first + v * kLanes);
    const uint32_t* w = block + first;
    for (int i = 0; i < num_pairs; i++, w += kPanel) {
      const auto ahead = static_cast<size_t>(R > 1 || !kReadsWhole ? num_pairs : kFetchPairs);
      for (int v = 0; v < kVectors; v += kLineVectors) fetch(w + ahead * kPanel + v * kLanes);
      add_products<R, kVectors>(
          acc, [&](auto part, int v) { return weights_part<part.value>(load_words(w + v * kLanes)); },
          [&](auto part, int r) { return input_part<part.value>(x + static_cast<size_t>(r) * x_stride + i); });
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) store(out[r] + first + v * kLanes, acc[r][v]);
  }
}

// out [num_rows][64] = rows times one panel.
inline void multiply_rows(int num_rows, const uint32_t* panel, int num_pairs, const Pair* x, int x_stride,
                          float (*out)[kPanel]) {
  for (int r = 0; r < num_rows; r++)
    for (int j = 0; j < kPanel; j++) out[r][j] = 0;
  for (int i = 0; i < num_pairs; i += kBlockPairs) {
    const int count = kBlockPairs < num_pairs - i ? kBlockPairs : num_pairs - i;
    for_row_tiles<kMaxRows>(num_rows, [&](int row, auto rows) {
      multiply_block<rows.value>(panel + static_cast<size_t>(i) * kPanel, count,
                                 x + static_cast<size_t>(row) * x_stride + i, x_stride, out + row);
    });
  }
}

}  // namespace
}  // namespace faser
