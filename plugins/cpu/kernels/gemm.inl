// Rows times panels, of bf16 (multiply_rows) or of integers (multiply_quantized.inl).
namespace faser {
namespace {

// Calls body(first_row, num_rows) on tiles of nearly equal size, at most max_rows: a short tile reuses weights poorly.
template <typename Body>
inline void for_row_tiles(int num_rows, int max_rows, Body&& body) {
  const int num_tiles = (num_rows + max_rows - 1) / max_rows;
  for (int tile = 0, row = 0; tile < num_tiles; tile++) {
    const int count = (num_rows - row + num_tiles - tile - 1) / (num_tiles - tile);
    body(row, count);
    row += count;
  }
}

}  // namespace
}  // namespace faser

#include "multiply_quantized.inl"

namespace faser {
namespace {

static_assert(kChunkRows >= kMaxRows, "a tile of bf16 rows fits where a chunk does");

inline int rows_at_once(const Matrix& m) { return m.bits == 16 ? kMaxRows : kChunkRows; }

// out [num_rows][64] = rows_at_once(m) rows at most times one panel.
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
    for_row_tiles(g.num_rows, rows_at_once(g.weights), [&](int row, int count) {
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
    for_row_tiles(g.num_rows, rows_at_once(g.weights), [&](int row, int count) {
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
