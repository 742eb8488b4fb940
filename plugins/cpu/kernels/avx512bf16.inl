// Primitives for AVX-512 with BF16: pairs are bf16 words, like weights.
#include <immintrin.h>

namespace faser {
namespace {

constexpr int kLanes = 16;

typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));

using Pair = uint32_t;

inline F madd(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// One instruction multiplies a pair of weights and one of inputs.
constexpr int kParts = 1;
using Part = __m512i;

template <int>
inline Part weights_part(U pairs) {
  return (__m512i)pairs;
}

// Rearranges the bytes of each word: kControl has the index of each result byte, lowest first, or 0x80 for zero.
template <uint32_t kControl>
inline __m512i shuffle_control() {
  const auto of_word = [](uint32_t word) {
    uint32_t control = kControl;
    for (int shift = 0; shift < 32; shift += 8)
      if ((kControl >> shift & 0x80) == 0) control += (4 * word) << shift;
    return static_cast<int>(control);
  };
  return _mm512_setr4_epi32(of_word(0), of_word(1), of_word(2), of_word(3));
}

template <uint32_t kControl>
inline I shuffled(U words) {
  return (I)_mm512_shuffle_epi8((__m512i)words, shuffle_control<kControl>());
}

// Pairs of integers are unpacked together, which takes fewer instructions.
constexpr bool kUnpacksPairs = true;

// e2m1, and integers times 2^28.
alignas(64) constexpr uint16_t kFp4Table[32] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                                0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(64) constexpr uint16_t kInt4Table[32] = {0,      0x4d80, 0x4e00, 0x4e40, 0x4e80, 0x4ea0, 0x4ec0, 0x4ee0,
                                                 0xcf00, 0xcee0, 0xcec0, 0xcea0, 0xce80, 0xce40, 0xce00, 0xcd80,
                                                 0,      0x4d80, 0x4e00, 0x4e40, 0x4e80, 0x4ea0, 0x4ec0, 0x4ee0,
                                                 0xcf00, 0xcee0, 0xcec0, 0xcea0, 0xce80, 0xce40, 0xce00, 0xcd80};

// The values 2 kPair and 2 kPair + 1 of each word over kUnit. Values of four bits are looked up: only the lowest five
// bits of an index count, and the tables hold everything twice, so bits left over from a neighbor do not matter.
// Values of eight bits become floats, whose upper halves are merged.
template <Code kCode, int kPair>
inline Part unpack_pair(U words) {
  if constexpr (kCode != kInt8) {
    const __m512i indices =
        _mm512_srlv_epi16((__m512i)shuffled<0x80008000u + kPair * 0x00010001u>(words),  // into both halves
                          _mm512_set1_epi32(0x00040000));
    return _mm512_permutexvar_epi16(indices, _mm512_load_si512(kCode == kFp4 ? kFp4Table : kInt4Table));
  } else {
    const I low = kPair == 0 ? (I)(words << 24) : shuffled<0x02808080u>(words);
    const I high = kPair == 0 ? shuffled<0x01808080u>(words) : (I)(words & 0xff000000u);
    return _mm512_mask_shuffle_epi8((__m512i) __builtin_convertvector(high, F), 0x3333333333333333u,
                                    (__m512i) __builtin_convertvector(low, F), shuffle_control<0x80800302u>());
  }
}

template <int kIndex>
F fp4_of(U words);  // for pairs only

template <int>
inline Part input_part(const Pair* x) {
  return _mm512_set1_epi32(static_cast<int>(*x));
}

// acc + low(weights) * low(input) + high(weights) * high(input)
inline F add_product(F acc, Part weights, Part input) {
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)input);
}

// kLanes neighboring inputs become kLanes / 2 pairs.
inline void store_pairs(F v, Pair* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

}  // namespace
}  // namespace faser
