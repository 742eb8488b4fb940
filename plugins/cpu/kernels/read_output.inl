// One output's weights as floats, the same on every instruction set.
namespace faser {
namespace {

inline void read_output(const Matrix& m, int index, int size, float* weights) {
  const int num_in = 2 * m.num_pairs, per_word = 32 / m.bits, num_words = num_in / per_word;
  const uint32_t* words = m.words + static_cast<size_t>(index / kPanel) * num_words * kPanel + index % kPanel;
  const int num_groups = m.group_size > 0 ? num_in / m.group_size : 1;
  const float* scales =
      m.bits == 16 ? nullptr : m.scales + static_cast<size_t>(index / kPanel) * num_groups * kPanel + index % kPanel;
  for (int i = 0; i < size; i++) {
    const uint32_t word = words[static_cast<size_t>(i / per_word) * kPanel];
    const uint32_t top = word << (32 - m.bits * (i % per_word + 1));
    if (m.bits == 16) {
      const uint32_t bits = top & 0xffff0000u;
      __builtin_memcpy(weights + i, &bits, sizeof(bits));
    } else {
      const int integer = static_cast<int32_t>(top) >> (32 - m.bits);
      const int group = m.group_size > 0 ? i / m.group_size : 0;
      weights[i] = static_cast<float>(integer) * scales[static_cast<size_t>(group) * kPanel];
    }
  }
}

}  // namespace
}  // namespace faser
