// Activations for instruction sets without products of bf16 pairs: floats with bf16 values.

namespace faser {
namespace {

// A pair of weights is multiplied with one of inputs in two parts, the low ones first.
constexpr int kParts = 2;
using Part = F;

template <int kPart>
inline Part weights_part(U pairs) {
  return kPart == 0 ? (F)(pairs << 16) : (F)(pairs & 0xffff0000u);
}

template <int kPart>
inline Part weights_part(F low, F high) {
  return kPart == 0 ? low : high;
}

constexpr bool kUnpacksPairs = false;
template <Code kCode, int kPair>
Part unpack_pair(U words);

template <int kPart>
inline Part input_part(const Pair* x) {
  return broadcast(kPart == 0 ? &x->low : &x->high);
}

inline F add_product(F acc, Part weights, Part input) { return madd(weights, input, acc); }

// kLanes neighboring inputs become kLanes / 2 pairs. Rounds to nearest even; NaN stays NaN.
inline void store_pairs(F v, Pair* out) {
  const U bits = (U)v;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  const I is_number = v == v;
  const U result = (rounded & (U)is_number) | ((bits | 0x400000u) & ~(U)is_number);
  __builtin_memcpy(out, &result, sizeof(result));
}

}  // namespace
}  // namespace faser
