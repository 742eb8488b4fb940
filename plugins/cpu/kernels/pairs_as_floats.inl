// Activations for instruction sets without bf16 pair products: floats holding bf16 values.

namespace faser {
namespace {

// kLanes neighbouring inputs become kLanes / 2 pairs. Rounds to nearest even; NaN stays NaN.
inline void store_pairs(F v, Pair* out) {
  const U bits = (U)v;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  const I is_number = v == v;
  const U result = (rounded & (U)is_number) | ((bits | 0x400000u) & ~(U)is_number);
  __builtin_memcpy(out, &result, sizeof(result));
}

}  // namespace
}  // namespace faser
