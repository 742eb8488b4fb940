// 8-bit inputs times integers with AVX2. Weights of 8 bits are multiplied with inputs as 16-bit halves, two products
// per sum. Weights of 4 bits, plus 8, are unsigned bytes: 16 products fit in a half of 16 bits, so 32 inputs in a sum.
namespace faser {
namespace {

constexpr int kByteSize = 2;  // maximum bytes of an 8-bit input

template <int kBits>
constexpr int kByteParts = 2;  // of a word: the even integers and the odd ones

template <int kBits>
constexpr int kByteInputs = kBits == 8 ? kSumInputs : 32;  // maximum inputs of a sum

template <int kBits>
constexpr int kByteOffset = kBits == 8 ? 0 : 8;

using ByteSum = __m256i;
using BytePart = __m256i;

template <int kBits, int kPart>
inline BytePart byte_part(U words) {
  const __m256i w = (__m256i)words;
  if constexpr (kBits == 8) return _mm256_srai_epi16(kPart == 0 ? _mm256_slli_epi16(w, 8) : w, 8);
  return (__m256i)(((words >> (4 * kPart)) & 0x0f0f0f0fu) ^ 0x08080808u);
}

// With four bits, sums are in the lower half, to which the upper one is added at the end.
template <int kBits>
inline ByteSum sum_from(int32_t start) {
  return _mm256_set1_epi32(kBits == 8 ? start : start & 0xffff);
}

template <int kBits>
inline ByteSum add_bytes(ByteSum sum, BytePart weights, int32_t inputs) {
  const __m256i x = _mm256_set1_epi32(inputs);
  if constexpr (kBits == 8) return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, x));
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
}

template <int kBits>
inline F floats_of(ByteSum sum) {
  return (F)_mm256_cvtepi32_ps(kBits == 8 ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
}

template <int kBits, int kPart>
inline int32_t byte_inputs(const int32_t* row, int i) {
  return row[2 * i + kPart];
}

// Stores inputs as byte_inputs reads them: for each word those of even index, then the others; 8 bits each in 16.
template <int kBits>
inline void store_bytes(const int8_t* integers, int count, char* out) {
  if constexpr (kBits == 8) {
    for (int i = 0; i < count; i += 4) {
      const int16_t halves[4] = {integers[i], integers[i + 2], integers[i + 1], integers[i + 3]};
      __builtin_memcpy(out + 2 * i, halves, sizeof(halves));
    }
  } else {
    for (int word = 0; word < count; word += 8)
      for (int i = 0; i < 4; i++) {
        out[word + i] = integers[word + 2 * i];
        out[word + 4 + i] = integers[word + 2 * i + 1];
      }
  }
}

// Loads kLanes inputs from index i of a row of pairs.
inline F load_inputs(const Pair* x, int i) { return load(&x->low + i); }

}  // namespace
}  // namespace faser
