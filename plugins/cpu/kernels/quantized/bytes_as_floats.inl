// Inputs of 8 bits times integers where nothing is said of the instruction set: as floats, which hold every sum
// exactly.
namespace faser {
namespace {

constexpr int kByteSize = sizeof(float);  // bytes that an input of 8 bits takes

template <int kBits>
constexpr int kByteParts = 32 / kBits;  // of a word: its integers

template <int kBits>
constexpr int kByteInputs = kSumInputs;  // that a sum holds at most

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

// kLanes inputs from place i of a row of pairs.
inline F load_inputs(const Pair* x, int i) { return load(&x->low + i); }

}  // namespace
}  // namespace faser
