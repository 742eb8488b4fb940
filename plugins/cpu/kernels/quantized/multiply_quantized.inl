// Rows times one panel of small numbers with scales (Matrix), for vectors. These numbers are exact in every type that
// is multiplied. A row is summed group by group, each in order, and scaled into the row's total. So its bits depend
// neither on the number of rows nor on whether weights were unpacked for many of them.
namespace faser {
namespace {

constexpr int kSumInputs = 128;  // inputs of a sum if a scale covers a whole output
constexpr int kFetchWords = 32;  // like kFetchPairs
constexpr int kUnpackedVectors = panel_vectors(kMaxRows);
// Up to this many rows, weights are unpacked for each tile, into registers; with more, once for all, into memory.
constexpr int kTiledRows = 3 * kMaxRows;

static_assert(kPanel % (kUnpackedVectors * kLanes) == 0, "columns of a panel are unpacked in whole parts");

// The integer at `kIndex` of each word, times 2^(32 - kBits).
template <int kBits, int kIndex>
inline F integer_of(U words) {
  U top = words << (32 - kBits * (kIndex + 1));
  if constexpr (kIndex > 0) top &= ~0u << (32 - kBits);
  return __builtin_convertvector((I)top, F);
}

template <Code kCode, int kIndex>
inline F value_of(U words) {
  if constexpr (kCode == kFp4)
    return fp4_of<kIndex>(words);
  else
    return integer_of<bits_of(kCode), kIndex>(words);
}

// Unit of the unpacked values.
template <Code kCode>
constexpr float kUnit = kCode == kFp4    ? 1.0f
                        : kCode == kInt8 ? 0x1p-24f
                                         : 0x1p-28f;

// Calls body(Constant<p>) for each pair p of a word.
template <Code kCode, typename Body>
inline void for_pairs(Body&& body) {
  for_constants<16 / bits_of(kCode)>(body);
}

template <Code kCode, int kPair, int kPart>
inline Part part_of(U words) {
  if constexpr (kUnpacksPairs)
    return unpack_pair<kCode, kPair>(words);
  else
    return weights_part<kPart>(value_of<kCode, 2 * kPair>(words), value_of<kCode, 2 * kPair + 1>(words));
}

template <Code kCode>
inline void add_scaled(F sum, const float* scales, float* total) {
  store(total, madd(sum, load(scales) * kUnit<kCode>, load(total)));
}

// total [R][64] += R rows times one group, words [num_words][64].
template <Code kCode, int R>
void multiply_group(const uint32_t* words, int num_words, const float* scales, const Pair* x, int x_stride,
                    float (*total)[kPanel]) {
  constexpr int kVectors = panel_vectors(R), kPairs = 16 / bits_of(kCode);
  for (int first = 0; first < kPanel; first += kVectors * kLanes) {
    F sum[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) sum[r][v] = F{};
    const uint32_t* w = words + first;
    for (int i = 0; i < num_words; i++, w += kPanel) {
      for (int v = 0; v < kVectors; v += kLineVectors) fetch(w + kFetchWords * kPanel + v * kLanes);
      for_pairs<kCode>([&](auto pair) {
        const Pair* inputs = x + i * kPairs + pair.value;
        add_products<R, kVectors>(
            sum, [&](auto part, int v) { return part_of<kCode, pair.value, part.value>(load_words(w + v * kLanes)); },
            [&](auto part, int r) { return input_part<part.value>(inputs + static_cast<size_t>(r) * x_stride); });
      });
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++)
        add_scaled<kCode>(sum[r][v], scales + first + v * kLanes, total[r] + first + v * kLanes);
  }
}

// A pair of weights of kUnpackedVectors vectors of outputs.
using UnpackedPair = Part[kParts][kUnpackedVectors];

// The same for kUnpackedVectors vectors of outputs, unpacked [num_pairs].
template <Code kCode, int R>
void multiply_unpacked(const UnpackedPair* unpacked, int num_pairs, const float* scales, const Pair* x, int x_stride,
                       float (*total)[kPanel], int first) {
  F sum[R][kUnpackedVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kUnpackedVectors; v++) sum[r][v] = F{};
  for (int i = 0; i < num_pairs; i++) {
    add_products<R, kUnpackedVectors>(
        sum, [&](auto part, int v) { return unpacked[i][part.value][v]; },
        [&](auto part, int r) { return input_part<part.value>(x + static_cast<size_t>(r) * x_stride + i); });
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kUnpackedVectors; v++)
      add_scaled<kCode>(sum[r][v], scales + first + v * kLanes, total[r] + first + v * kLanes);
}

template <Code kCode>
void multiply_many(int num_rows, const uint32_t* words, int num_words, const float* scales, const Pair* x, int x_stride,
                   float (*total)[kPanel]) {
  constexpr int kPairs = 16 / bits_of(kCode);
  alignas(64) UnpackedPair unpacked[kSumInputs / 2];
  for (int first = 0; first < kPanel; first += kUnpackedVectors * kLanes) {
    for (int i = 0; i < num_words; i++) {
      for (int v = 0; v < kUnpackedVectors; v += kLineVectors)
        fetch(words + static_cast<size_t>(i + num_words) * kPanel + first + v * kLanes);
      for (int v = 0; v < kUnpackedVectors; v++) {
        const U w = load_words(words + static_cast<size_t>(i) * kPanel + first + v * kLanes);
        for_pairs<kCode>([&](auto pair) {
          for_parts([&](auto part) {
            unpacked[i * kPairs + pair.value][part.value][v] = part_of<kCode, pair.value, part.value>(w);
          });
        });
      }
    }
    for_row_tiles<kMaxRows>(num_rows, [&](int row, auto rows) {
      multiply_unpacked<kCode, rows.value>(unpacked, num_words * kPairs, scales,
                                           x + static_cast<size_t>(row) * x_stride, x_stride, total + row, first);
    });
  }
}

template <Code kCode>
void multiply_quantized(int num_rows, const Matrix& m, int panel, const Pair* x, int x_stride, float (*out)[kPanel]) {
  constexpr int kPairs = 16 / bits_of(kCode);
  const int num_words = m.num_pairs / kPairs;
  const bool has_groups = m.group_size > 0;
  const int group_words = (has_groups ? m.group_size : kSumInputs) / (2 * kPairs);
  const uint32_t* words = m.words + static_cast<size_t>(panel) * num_words * kPanel;
  const float* scales = m.scales + static_cast<size_t>(panel) * (has_groups ? num_words / group_words : 1) * kPanel;
  for (int r = 0; r < num_rows; r++)
    for (int j = 0; j < kPanel; j++) out[r][j] = 0;
  for (int i = 0; i < num_words; i += group_words) {
    const int count = group_words < num_words - i ? group_words : num_words - i;
    const uint32_t* group = words + static_cast<size_t>(i) * kPanel;
    const Pair* inputs = x + i * kPairs;
    if (num_rows > kTiledRows) {
      multiply_many<kCode>(num_rows, group, count, scales, inputs, x_stride, out);
    } else {
      for_row_tiles<kMaxRows>(num_rows, [&](int row, auto rows) {
        multiply_group<kCode, rows.value>(group, count, scales, inputs + static_cast<size_t>(row) * x_stride, x_stride,
                                          out + row);
      });
    }
    if (has_groups) scales += kPanel;
  }
}

}  // namespace
}  // namespace faser
