// Rows times one packed panel with vectors, panel_vectors(R) registers of outputs for R rows at a time.
namespace faser {
namespace {

// Vector kernels need no setup.
struct MultiplyScope {
  MultiplyScope() {}
};

// out [R][64] = R rows times one panel. Each output is one sum over the pairs in order, for any R.
template <int R>
void multiply(const uint32_t* panel, int num_pairs, const Pair* x, int x_stride, float (*out)[kPanel]) {
  constexpr int kVectors = panel_vectors(R);
  for (int first = 0; first < kPanel; first += kVectors * kLanes) {
    F acc[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) acc[r][v] = F{};
    const uint32_t* w = panel + first;
    for (int i = 0; i < num_pairs; i++, w += kPanel) {
      for (int v = 0; v < kVectors; v++) {
        const Weights weights(load_words(w + v * kLanes));
        for (int r = 0; r < R; r++)
          acc[r][v] = dot(acc[r][v], weights, broadcast(x + static_cast<size_t>(r) * x_stride + i));
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) store(out[r] + first + v * kLanes, acc[r][v]);
  }
}

inline void multiply_rows(int num_rows, const uint32_t* panel, int num_pairs, const Pair* x, int x_stride,
                          float (*out)[kPanel]) {
  switch (num_rows) {
    case 1:
      return multiply<1>(panel, num_pairs, x, x_stride, out);
    case 2:
      return multiply<2>(panel, num_pairs, x, x_stride, out);
    case 3:
      return multiply<3>(panel, num_pairs, x, x_stride, out);
    case 4:
      return multiply<4>(panel, num_pairs, x, x_stride, out);
  }
  if constexpr (kMaxRows > 4) {
    if (num_rows == 5) return multiply<5>(panel, num_pairs, x, x_stride, out);
    return multiply<6>(panel, num_pairs, x, x_stride, out);
  }
}

}  // namespace
}  // namespace faser
