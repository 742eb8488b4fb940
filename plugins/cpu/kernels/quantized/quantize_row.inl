// Quantizes a row of inputs to 8 bits: symmetric, with a scale for each group of the weights (of 128 inputs if a scale
// covers a whole output), rounded to nearest even. The values are the same on every instruction set, the layout is not
// (ByteRow, store_bytes).
namespace faser {
namespace {

inline int byte_group(const Matrix& m) { return m.group_size > 0 ? m.group_size : kSumInputs; }

// A row: a scale for each group, a start for each sum of 32 inputs or more, then the inputs.
struct ByteRow {
  const float* scales;
  const int32_t *starts, *inputs;
};

inline ByteRow byte_row(const Matrix& m, const uint32_t* row) {
  const int num_inputs = 2 * m.num_pairs, num_groups = (num_inputs + byte_group(m) - 1) / byte_group(m);
  const auto* words = reinterpret_cast<const int32_t*>(row);
  return {reinterpret_cast<const float*>(row), words + num_groups, words + byte_row_header(num_inputs)};
}

template <int kBits>
void quantize_inputs(const Matrix& m, const Pair* x, uint32_t* out) {
  typedef int8_t C __attribute__((vector_size(kLanes)));
  const int num_inputs = 2 * m.num_pairs, group_size = byte_group(m);
  const ByteRow row = byte_row(m, out);
  auto* scales = const_cast<float*>(row.scales);
  auto* starts = const_cast<int32_t*>(row.starts);
  auto* inputs = reinterpret_cast<char*>(const_cast<int32_t*>(row.inputs));
  constexpr int kInputSize = kBits == 4 && kByteSize == 2 ? 1 : kByteSize;
  const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  for (int first = 0; first < num_inputs; first += group_size) {
    const int count = num_inputs - first < group_size ? num_inputs - first : group_size;
    F largest = {}, poison = {};
    for (int i = first; i < first + count; i += kLanes) {
      const F v = load_inputs(x, i), size = (F)((U)v & 0x7fffffffu);
      largest = select(size > largest, size, largest);
      poison += v * 0.0f;
    }
    const float most = max_of(largest);
    *scales++ = most / 127.0f + sum_of(poison);  // NaN if an input is NaN or infinite
    const F inverse = F{} + (most > 1e-30f ? 127.0f / most : 0.0f);
    alignas(64) int8_t integers[kSumInputs];
    for (int i = 0; i < count; i += kLanes) {
      const I rounded = (I)(load_inputs(x, first + i) * inverse + shift) - (I)shift;
      const C narrow = __builtin_convertvector(rounded, C);
      __builtin_memcpy(integers + i, &narrow, sizeof(narrow));
    }
    constexpr int kSum = kByteInputs<kBits>;
    for (int i = 0; i < count; i += kSum) {
      int32_t sum = 0;
      for (int j = i; j < i + kSum && j < count; j++) sum += integers[j];
      *starts++ = -kByteOffset<kBits> * sum;
    }
    store_bytes<kBits>(integers, count, inputs + static_cast<size_t>(first) * kInputSize);
  }
}

void quantize_row(const Matrix& weights, const void* x, uint32_t* out) {
  const Pair* pairs = static_cast<const Pair*>(x);
  if (weights.bits == 8)
    quantize_inputs<8>(weights, pairs, out);
  else
    quantize_inputs<4>(weights, pairs, out);
}

}  // namespace
}  // namespace faser
