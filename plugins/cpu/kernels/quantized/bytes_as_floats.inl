// 8-bit inputs times integers without a specific instruction set: as floats, which represent every sum exactly.
namespace faser {
namespace {

constexpr int kByteSize = sizeof(float);  // bytes of an 8-bit input

template <int kBits>
constexpr int kByteParts = 32 / kBits;  // integers in a word

template <int kBits>
constexpr int kByteInputs = kSumInputs;  // maximum inputs of a sum

template <int kBits>
constexpr int kByteOffset = 0;

using ByteSum = F;
using BytePart = F;

template <int kBits, int kPart>
inline BytePart byte_part(U words) {
  return integer_of<kBits, kPart>(words);
}

template <int>
inline ByteSum sum_from(int32_t) {
  return F{};
}

template <int>
inline ByteSum add_bytes(ByteSum sum, BytePart weights, float input) {
  return madd(weights, F{} + input, sum);
}

template <int kBits>
inline F floats_of(ByteSum sum) {
  return sum * kUnit < kBits == 8 ? kInt8 : kInt4 > ;
}

template <int kBits, int kPart>
inline float byte_inputs(const int32_t* row, int i) {
  return float_of(static_cast<uint32_t>(row[i * kByteParts<kBits> + kPart]));
}

template <int>
inline void store_bytes(const int8_t* integers, int count, char* out) {
  for (int i = 0; i < count; i++) {
    const auto value = static_cast<float>(integers[i]);
    __builtin_memcpy(out + sizeof(float) * i, &value, sizeof(value));
  }
}

// Loads kLanes inputs from index i of a row of pairs.
inline F load_inputs(const Pair* x, int i) { return load(&x->low + i); }

}  // namespace
}  // namespace faser
