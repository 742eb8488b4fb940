// 8-bit inputs times integers with AVX-512 VNNI: one instruction adds four products to each sum. One of its operands is
// unsigned: the weights, plus an offset. A sum starts at the negative of what the offset adds.
namespace faser {
namespace {

constexpr int kByteSize = 1;  // bytes of an 8-bit input

template <int kBits>
constexpr int kByteParts = kBits == 8 ? 1 : 2;  // of a word; with four bits, the even integers and the odd ones

template <int kBits>
constexpr int kByteInputs = kSumInputs;  // maximum inputs of a sum

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

// In place, since GCC moves the intrinsic's sums around and spills them.
template <int>
inline ByteSum add_bytes(ByteSum sum, BytePart weights, int32_t inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(_mm512_set1_epi32(inputs)));
  return sum;
}

template <int>
inline F floats_of(ByteSum sum) {
  return (F)_mm512_cvtepi32_ps(sum);
}

// The inputs for word i's part: in a block of four words of eight inputs, first those of even index.
template <int kBits, int kPart>
inline int32_t byte_inputs(const int32_t* row, int i) {
  if constexpr (kBits == 8) return row[i];
  return row[2 * (i & ~3) + 4 * kPart + (i & 3)];
}

// Stores inputs as byte_inputs reads them; count is a multiple of 32.
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

// Loads kLanes inputs from index i of a row of pairs.
inline F load_inputs(const Pair* x, int i) {
  return (F)(U)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i / 2))),
                                 16);
}

}  // namespace
}  // namespace faser
