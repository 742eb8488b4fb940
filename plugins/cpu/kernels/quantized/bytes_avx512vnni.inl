// Inputs of 8 bits times integers with AVX-512 VNNI: one instruction adds four products to each sum. One of its sides
// is unsigned, which is the weights, raised by an offset; a sum starts at what that adds, negated.
namespace faser {
namespace {

constexpr int kByteSize = 1;  // bytes that an input of 8 bits takes

template <int kBits>
constexpr int kByteParts = kBits == 8 ? 1 : 2;  // of a word; of four bits, the even integers and the odd ones

template <int kBits>
constexpr int kByteInputs = kSumInputs;  // that a sum holds at most

template <int kBits>
constexpr int kByteOffset = 1 << (kBits - 1);

using ByteSum = __m512i;
using BytePart = __m512i;

template <int kBits, int kPart>
inline BytePart byte_part(U words) {
  if constexpr (kBits == 8) {
    return (__m512i)(words ^ 0x80808080u);
  } else {
    constexpr int kAndThenXor = 0x6a;
    return _mm512_ternarylogic_epi32((__m512i)(words >> (4 * kPart)), _mm512_set1_epi32(0x0f0f0f0f),
                                     _mm512_set1_epi32(0x08080808), kAndThenXor);
  }
}

template <int>
inline ByteSum sum_from(int32_t start) {
  return _mm512_set1_epi32(start);
}

// In place: GCC moves the sums of the intrinsic about, and spills them.
template <int>
inline ByteSum add_bytes(ByteSum sum, BytePart weights, int32_t inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(_mm512_set1_epi32(inputs)));
  return sum;
}

template <int>
inline F floats_of(ByteSum sum) {
  return (F)_mm512_cvtepi32_ps(sum);
}

// The inputs that meet word i's part: of a block of four words of eight inputs, first those of even places.
template <int kBits, int kPart>
inline int32_t byte_inputs(const int32_t* row, int i) {
  if constexpr (kBits == 8) return row[i];
  return row[2 * (i & ~3) + 4 * kPart + (i & 3)];
}

// As byte_inputs reads them; count is a multiple of 32.
template <int kBits>
inline void store_bytes(const int8_t* integers, int count, char* out) {
  if constexpr (kBits == 8) {
    __builtin_memcpy(out, integers, static_cast<size_t>(count));
  } else {
    for (int block = 0; block < count; block += 32)
      for (int i = 0; i < 16; i++) {
        out[block + i] = integers[block + 2 * i];
        out[block + 16 + i] = integers[block + 2 * i + 1];
      }
  }
}

// kLanes inputs from place i of a row of pairs.
inline F load_inputs(const Pair* x, int i) {
  return (F)(U)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i / 2))),
                                 16);
}

}  // namespace
}  // namespace faser
