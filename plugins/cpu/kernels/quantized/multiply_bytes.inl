// Rows of 8-bit inputs (quantize_row.inl) times one panel of integers. Integer sums are exact; they are scaled and
// added in the order of the inputs, so a row's bits do not depend on other rows.
namespace faser {
namespace {

// total [R][64] += R rows times one sum's inputs of a panel, words [num_words][64]. sum: its index; group: its scale's.
template <int kBits, int R>
void multiply_sum(const uint32_t* words, int first_word, int num_words, const float* scales, const ByteRow* rows,
                  int sum, int group, float (*total)[kPanel]) {
  constexpr int kVectors = panel_vectors(R), kParts = kByteParts<kBits>;
  for (int first = 0; first < kPanel; first += kVectors * kLanes) {
    ByteSum sums[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) sums[r][v] = sum_from<kBits>(rows[r].starts[sum]);
    const uint32_t* w = words + first;
    for (int i = first_word; i < first_word + num_words; i++, w += kPanel) {
      for (int v = 0; v < kVectors; v += kLineVectors) fetch(w + kFetchWords * kPanel + v * kLanes);
      for_constants<kParts>([&](auto part) {
        BytePart weights[kVectors];
        for (int v = 0; v < kVectors; v++) weights[v] = byte_part<kBits, part.value>(load_words(w + v * kLanes));
        for (int r = 0; r < R; r++) {
          const auto inputs = byte_inputs<kBits, part.value>(rows[r].inputs, i);
          for (int v = 0; v < kVectors; v++) sums[r][v] = add_bytes<kBits>(sums[r][v], weights[v], inputs);
        }
      });
    }
    for (int r = 0; r < R; r++) {
      const F scale = F{} + rows[r].scales[group];
      for (int v = 0; v < kVectors; v++) {
        float* out = total[r] + first + v * kLanes;
        store(out, madd(floats_of<kBits>(sums[r][v]), load(scales + first + v * kLanes) * scale, load(out)));
      }
    }
  }
}

template <int kBits>
void multiply_bytes(int num_rows, const Matrix& m, int panel, const uint32_t* x, int x_stride, float (*out)[kPanel]) {
  constexpr int kPerWord = 32 / kBits;
  const bool has_groups = m.group_size > 0;
  const int num_words = 2 * m.num_pairs / kPerWord, group_words = byte_group(m) / kPerWord;
  const int sum_words = kByteInputs<kBits> / kPerWord < group_words ? kByteInputs<kBits> / kPerWord : group_words;
  const uint32_t* words = m.words + static_cast<size_t>(panel) * num_words * kPanel;
  const float* scales = m.scales + static_cast<size_t>(panel) * (has_groups ? num_words / group_words : 1) * kPanel;
  ByteRow rows[kChunkRows];
  for (int r = 0; r < num_rows; r++) {
    rows[r] = byte_row(m, x + static_cast<size_t>(r) * x_stride);
    for (int j = 0; j < kPanel; j++) out[r][j] = 0;
  }
  for (int i = 0, sum = 0; i < num_words; i += sum_words, sum++) {
    const int count = sum_words < num_words - i ? sum_words : num_words - i, group = i / group_words;
    for_row_tiles<kMaxRows>(num_rows, [&](int row, auto tile) {
      multiply_sum<kBits, tile.value>(words + static_cast<size_t>(i) * kPanel, i, count,
                                      has_groups ? scales + static_cast<size_t>(group) * kPanel : scales, rows + row,
                                      sum, group, out + row);
    });
  }
}

}  // namespace
}  // namespace faser
