// Rows times panels, of bf16 (multiply_rows) or of integers (multiply_quantized.inl).
#include "multiply_quantized.inl"

namespace faser {
namespace {

constexpr int kChunkRows = 48;  // rows that meet a panel together: whole tiles of every instruction set

// body(first_row, num_rows) on chunks of rows.
template <typename Body>
inline void for_row_chunks(int num_rows, Body&& body) {
  for (int row = 0; row < num_rows; row += kChunkRows)
    body(row, num_rows - row < kChunkRows ? num_rows - row : kChunkRows);
}

// out [num_rows][64] = kChunkRows rows at most times one panel.
inline void multiply_panel(int num_rows, const Matrix& m, int panel, const Pair* x, int x_stride,
                           float (*out)[kPanel]) {
  if (m.bits == 8) return multiply_integers<8>(num_rows, m, panel, x, x_stride, out);
  if (m.bits == 4) return multiply_integers<4>(num_rows, m, panel, x, x_stride, out);
  multiply_rows(num_rows, m.words + static_cast<size_t>(panel) * m.num_pairs * kPanel, m.num_pairs, x, x_stride, out);
}

template <bool kAdd>
void gemm_panels(const Gemm& g, int first_panel, int last_panel, float* y, int y_stride) {
  const Pair* x = static_cast<const Pair*>(g.x);
  alignas(64) float out[kChunkRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    const float* bias = g.bias != nullptr ? g.bias + p * kPanel : nullptr;
    for_row_chunks(g.num_rows, [&](int row, int count) {
      multiply_panel(count, g.weights, p, x + static_cast<size_t>(row) * g.x_stride, g.x_stride, out);
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
  alignas(64) float gate[kChunkRows][kPanel], up[kChunkRows][kPanel];
  const MultiplyScope scope;
  for (int p = first_panel; p < last_panel; p++) {
    for_row_chunks(g.num_rows, [&](int row, int count) {
      const Pair* rows = x + static_cast<size_t>(row) * g.x_stride;
      multiply_panel(count, g.weights, p, rows, g.x_stride, gate);
      multiply_panel(count, g.weights, p + up_panel, rows, g.x_stride, up);
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
