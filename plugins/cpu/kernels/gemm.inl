namespace faser {
namespace {

// Calls body(first_row, num_rows) on tiles of nearly equal size: a short tile reuses weights poorly.
template <typename Body>
inline void for_row_tiles(int num_rows, Body&& body) {
  const int num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int tile = 0, row = 0; tile < num_tiles; tile++) {
    const int count = (num_rows - row + num_tiles - tile - 1) / (num_tiles - tile);
    body(row, count);
    row += count;
  }
}

template <bool kAdd>
void gemm_panels(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride) {
  const Pair* x = static_cast<const Pair*>(g.x);
  alignas(64) float out[kMaxRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    const uint32_t* panel = g.weights + static_cast<size_t>(p) * g.num_pairs * kPanel;
    const float* bias = g.bias != nullptr ? g.bias + p * kPanel : nullptr;
    for_row_tiles(g.num_rows, [&](int row, int count) {
      multiply_rows(count, panel, g.num_pairs, x + static_cast<size_t>(row) * g.x_stride, g.x_stride, out);
      for (int r = 0; r < count; r++) {
        float* target = y + static_cast<size_t>(row + r) * y_stride + p * kPanel;
        for (int j = 0; j < kPanel; j += kLanes) {
          F v = load(out[r] + j);
          if (bias != nullptr) v += load(bias + j);
          if (kAdd) v += load(target + j);
          store(target + j, v);
        }
      }
    });
  }
}

void gemm(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride) {
  gemm_panels<false>(g, first_panel, last_panel, y, y_stride);
}

void gemm_add(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride) {
  gemm_panels<true>(g, first_panel, last_panel, y, y_stride);
}

void gemm_swiglu(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride) {
  const Pair* x = static_cast<const Pair*>(g.x);
  const size_t panel_words = static_cast<size_t>(g.num_pairs) * kPanel;
  alignas(64) float gate[kMaxRows][kPanel], up[kMaxRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    const uint32_t* gate_weights = g.weights + p * panel_words;
    const uint32_t* up_weights = g.weights + (p + up_panel) * panel_words;
    for_row_tiles(g.num_rows, [&](int row, int count) {
      const Pair* rows = x + static_cast<size_t>(row) * g.x_stride;
      multiply_rows(count, gate_weights, g.num_pairs, rows, g.x_stride, gate);
      multiply_rows(count, up_weights, g.num_pairs, rows, g.x_stride, up);
      for (int r = 0; r < count; r++) {
        Pair* target = static_cast<Pair*>(out) + static_cast<size_t>(row + r) * out_stride + p * (kPanel / 2);
        for (int j = 0; j < kPanel; j += kLanes) {
          F a = load(gate[r] + j), b = load(up[r] + j);
          if (g.bias != nullptr) {
            a += load(g.bias + p * kPanel + j);
            b += load(g.bias + (p + up_panel) * kPanel + j);
          }
          store_pairs(silu(a) * b, target + j / 2);
        }
      }
    });
  }
}

}  // namespace
}  // namespace faser
