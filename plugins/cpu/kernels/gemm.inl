// Rows times panels of bf16 (multiply_rows) or integers (quantized/).
namespace faser {
namespace {

// Calls body(first_row, num_rows) on chunks of rows.
template <typename Body>
inline void for_row_chunks(int num_rows, Body&& body) {
  for (int row = 0; row < num_rows; row += kChunkRows)
    body(row, num_rows - row < kChunkRows ? num_rows - row : kChunkRows);
}

// out [num_rows][64] = at most kChunkRows rows, from first_row on, times one panel.
inline void multiply_panel(const Gemm& g, int panel, int first_row, int num_rows, float (*out)[kPanel]) {
  const Matrix& m = g.weights;
  const size_t first = static_cast<size_t>(first_row) * g.x_stride;
  if (m.input_bits == 8) {
    const uint32_t* x = static_cast<const uint32_t*>(g.x) + first;
    if (m.bits == 8) return multiply_bytes<8>(num_rows, m, panel, x, g.x_stride, out);
    return multiply_bytes<4>(num_rows, m, panel, x, g.x_stride, out);
  }
  const Pair* x = static_cast<const Pair*>(g.x) + first;
  if (m.is_fp4) return multiply_quantized<kFp4>(num_rows, m, panel, x, g.x_stride, out);
  if (m.bits == 8) return multiply_quantized<kInt8>(num_rows, m, panel, x, g.x_stride, out);
  if (m.bits == 4) return multiply_quantized<kInt4>(num_rows, m, panel, x, g.x_stride, out);
  multiply_rows(num_rows, m.words + static_cast<size_t>(panel) * m.num_pairs * kPanel, m.num_pairs, x, g.x_stride, out);
}

template <bool kAdd>
void gemm_panels(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride) {
  alignas(64) float out[kChunkRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    const float* bias = g.bias != nullptr ? g.bias + p * kPanel : nullptr;
    for_row_chunks(g.num_rows, [&](int row, int count) {
      multiply_panel(g, p, row, count, out);
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

template <typename Activation>
void gemm_gated(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride,
                const Activation& activation) {
  alignas(64) float gate[kChunkRows][kPanel], up[kChunkRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    for_row_chunks(g.num_rows, [&](int row, int count) {
      multiply_panel(g, p, row, count, gate);
      multiply_panel(g, p + up_panel, row, count, up);
      for (int r = 0; r < count; r++) {
        Pair* target = static_cast<Pair*>(out) + static_cast<size_t>(row + r) * out_stride + p * (kPanel / 2);
        for (int j = 0; j < kPanel; j += kLanes) {
          F a = load(gate[r] + j), b = load(up[r] + j);
          if (g.bias != nullptr) {
            a += load(g.bias + p * kPanel + j);
            b += load(g.bias + (p + up_panel) * kPanel + j);
          }
          store_pairs(activation(a, b), target + j / 2);
        }
      }
    });
  }
}

void gemm_swiglu(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride) {
  gemm_gated(g, first_panel, last_panel, up_panel, out, out_stride, [](F gate, F up) { return silu(gate) * up; });
}

void gemm_clamped_swiglu(const Gemm& g, int first_panel, int last_panel, int up_panel, void* out, int out_stride) {
  gemm_gated(g, first_panel, last_panel, up_panel, out, out_stride, [](F gate, F up) {
    const F limit = F{} + 7.0f;
    gate = select(gate > limit, limit, gate);
    up = select(up > limit, limit, select(up < -limit, -limit, up));
    return (up + 1.0f) * (gate / (exp_of(gate * -1.702f) + 1.0f));
  });
}

}  // namespace
}  // namespace faser
