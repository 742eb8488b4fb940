// Rows times one panel of small integers with scales (Matrix), for vectors. Integers are exact in every type that dot()
// multiplies; a row's sum is taken group by group, each group's in order, and scaled into the row's total. So its bits
// depend neither on the number of rows nor on whether weights were unpacked for many of them.
namespace faser {
namespace {

constexpr int kSumInputs = 128;   // inputs of a sum where a scale covers a whole output
constexpr int kChunkRows = 48;    // rows that share unpacked weights
constexpr int kUnpackedRows = 6;  // rows multiplied at once by unpacked weights
constexpr int kUnpackedVectors = panel_vectors(kVectorRows);

static_assert(kPanel % (kUnpackedVectors * kLanes) == 0, "columns of a panel are unpacked in whole parts");

// The integer at `kIndex` of each word, times 2^(32 - kBits).
template <int kBits, int kIndex>
inline F integer_of(U words) {
  U top = words << (32 - kBits * (kIndex + 1));
  if constexpr (kIndex > 0) top &= ~0u << (32 - kBits);
  return __builtin_convertvector((I)top, F);
}

template <int kBits>
constexpr float kUnit = kBits == 8 ? 0x1p-24f : 0x1p-28f;

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// body(Constant<p>) for each pair p of a word.
template <int kBits, int kPair = 0, typename Body>
inline void for_pairs(Body&& body) {
  if constexpr (kPair < 16 / kBits) {
    body(Constant<kPair>{});
    for_pairs<kBits, kPair + 1>(body);
  }
}

template <int kBits, int kPair>
inline Weights pair_of(U words) {
  return Weights(integer_of<kBits, 2 * kPair>(words), integer_of<kBits, 2 * kPair + 1>(words));
}

template <int kBits>
inline void add_scaled(F sum, const float* scales, float* total) {
  store(total, madd(sum, load(scales) * kUnit<kBits>, load(total)));
}

// total [R][64] += R rows times one group, words [num_words][64].
template <int kBits, int R>
void multiply_group(const uint32_t* words, int num_words, const float* scales, const Pair* x, int x_stride,
                    float (*total)[kPanel]) {
  constexpr int kVectors = panel_vectors(R), kPairs = 16 / kBits;
  for (int first = 0; first < kPanel; first += kVectors * kLanes) {
    F sum[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) sum[r][v] = F{};
    const uint32_t* w = words + first;
    for (int i = 0; i < num_words; i++, w += kPanel) {
      for_pairs<kBits>([&](auto pair) {
        const Pair* inputs = x + i * kPairs + pair.value;
        for (int v = 0; v < kVectors; v++) {
          const Weights weights = pair_of<kBits, pair.value>(load_words(w + v * kLanes));
          for (int r = 0; r < R; r++)
            sum[r][v] = dot(sum[r][v], weights, broadcast(inputs + static_cast<size_t>(r) * x_stride));
        }
      });
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++)
        add_scaled<kBits>(sum[r][v], scales + first + v * kLanes, total[r] + first + v * kLanes);
  }
}

// The same for kUnpackedVectors vectors of outputs, unpacked [num_pairs][kUnpackedVectors].
template <int kBits, int R>
void multiply_unpacked(const Weights (*unpacked)[kUnpackedVectors], int num_pairs, const float* scales, const Pair* x,
                       int x_stride, float (*total)[kPanel], int first) {
  F sum[R][kUnpackedVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kUnpackedVectors; v++) sum[r][v] = F{};
  for (int i = 0; i < num_pairs; i++) {
    for (int r = 0; r < R; r++) {
      const Broadcast input = broadcast(x + static_cast<size_t>(r) * x_stride + i);
      for (int v = 0; v < kUnpackedVectors; v++) sum[r][v] = dot(sum[r][v], unpacked[i][v], input);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kUnpackedVectors; v++)
      add_scaled<kBits>(sum[r][v], scales + first + v * kLanes, total[r] + first + v * kLanes);
}

// body(Constant<num_rows>) for 1 to 6 rows.
template <typename Body>
inline void with_rows(int num_rows, Body&& body) {
  switch (num_rows) {
    case 1:
      return body(Constant<1>{});
    case 2:
      return body(Constant<2>{});
    case 3:
      return body(Constant<3>{});
    case 4:
      return body(Constant<4>{});
    case 5:
      return body(Constant<5>{});
    default:
      return body(Constant<6>{});
  }
}

template <int kBits>
void multiply_many(int num_rows, const uint32_t* words, int num_words, const float* scales, const Pair* x, int x_stride,
                   float (*total)[kPanel]) {
  constexpr int kPairs = 16 / kBits;
  alignas(64) Weights unpacked[kSumInputs / 2][kUnpackedVectors];
  for (int first = 0; first < kPanel; first += kUnpackedVectors * kLanes) {
    for (int i = 0; i < num_words; i++)
      for (int v = 0; v < kUnpackedVectors; v++) {
        const U w = load_words(words + static_cast<size_t>(i) * kPanel + first + v * kLanes);
        for_pairs<kBits>([&](auto pair) { unpacked[i * kPairs + pair.value][v] = pair_of<kBits, pair.value>(w); });
      }
    for_row_tiles(num_rows, kUnpackedRows, [&](int row, int count) {
      with_rows(count, [&](auto rows) {
        multiply_unpacked<kBits, rows.value>(unpacked, num_words * kPairs, scales,
                                             x + static_cast<size_t>(row) * x_stride, x_stride, total + row, first);
      });
    });
  }
}

template <int kBits>
void multiply_integers(int num_rows, const Matrix& m, int panel, const Pair* x, int x_stride, float (*out)[kPanel]) {
  constexpr int kPairs = 16 / kBits;
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
    if (num_rows > kVectorRows) {
      multiply_many<kBits>(num_rows, group, count, scales, inputs, x_stride, out);
    } else {
      with_rows(num_rows, [&](auto rows) {
        if constexpr (rows.value <= kVectorRows)
          multiply_group<kBits, rows.value>(group, count, scales, inputs, x_stride, out);
      });
    }
    if (has_groups) scales += kPanel;
  }
}

}  // namespace
}  // namespace faser
