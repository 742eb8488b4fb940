#include "kernels.h"

#if defined(__AMX_BF16__)

// clang-format off: each file builds on those before it
#include "avx512bf16.inl"
#include "vector_math.inl"
// clang-format on

namespace faser {
namespace {

constexpr char kName[] = "amxbf16";
constexpr int kTileRows = 16;
constexpr int kMaxRows = 6;  // for integers, which AVX-512 multiplies
constexpr int kTileSize = 16;
constexpr int kTilePairs = 16;  // a tile is 16 rows of 16 words

constexpr int panel_vectors(int) { return 4; }

// All eight tiles at full size: 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles are configured only during a multiplication: other code of this thread may use them, and idle tile state
// would be saved at every context switch.
class MultiplyScope {
 public:
  MultiplyScope() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~MultiplyScope() { _tile_release(); }
};

// out [16][64] = 16 rows times one panel, for any number of rows, since x is allocated in multiples of 16. Each row is
// summed in the same order.
inline void multiply_tile(const uint32_t* panel, int num_pairs, const Pair* x, int x_stride, float (*out)[kPanel]) {
  const int x_bytes = x_stride * static_cast<int>(sizeof(Pair));
  constexpr int kPanelBytes = kPanel * sizeof(uint32_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < num_pairs; i += kTilePairs) {
    const uint32_t* weights = panel + static_cast<size_t>(i) * kPanel;
    _tile_loadd(4, x + i, x_bytes);
    _tile_loadd(5, weights, kPanelBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + 16, kPanelBytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 32, kPanelBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 48, kPanelBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, out[0], kPanel * sizeof(float));
  _tile_stored(1, out[0] + 16, kPanel * sizeof(float));
  _tile_stored(2, out[0] + 32, kPanel * sizeof(float));
  _tile_stored(3, out[0] + 48, kPanel * sizeof(float));
}

// out is allocated in multiples of 16 rows too.
inline void multiply_rows(int num_rows, const uint32_t* panel, int num_pairs, const Pair* x, int x_stride,
                          float (*out)[kPanel]) {
  for (int row = 0; row < num_rows; row += kTileRows)
    multiply_tile(panel, num_pairs, x + static_cast<size_t>(row) * x_stride, x_stride, out + row);
}

}  // namespace
}  // namespace faser

// clang-format off: each file builds on those before it
#include "parts.inl"
#include "attention_chunk.inl"
#include "attention_tiles.inl"
#define FASER_BYTES "quantized/bytes_avx512vnni.inl"
#include "kernels.inl"
// clang-format on

namespace faser {
const Kernels* amxbf16_kernels() { return &kTable; }
}  // namespace faser

#else

namespace faser {
const Kernels* amxbf16_kernels() { return nullptr; }
}  // namespace faser

#endif
