namespace faser {
namespace {

constexpr int kPageVectors = kPageTokens / kLanes;
constexpr int kLineVectors = 16 / kLanes;  // per cache line of 64 bytes

inline F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof(v)); }

inline U load_words(const uint32_t* p) {
  U v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

// Prefetches to the second-level cache.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline F select(I condition, F yes, F no) { return (F)(((U)yes & (U)condition) | ((U)no & ~(U)condition)); }

inline float float_of(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, sizeof(f));
  return f;
}

// Rounds to nearest even; NaN stays NaN.
inline uint32_t bf16_of(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return f == f ? rounded : (bits >> 16 | 0x40u);
}

// Adds lanes by halves, in a fixed order.
inline float sum_of(F v) {
  float lanes[kLanes];
  __builtin_memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max_of(F v) {
  float lanes[kLanes];
  __builtin_memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  return lanes[0];
}

// e^x within 2 ulp on [-87, 88]; 0 below, e^88 above, NaN stays NaN. Cody-Waite reduction and a polynomial (Cephes
// expf), implemented here so that results do not depend on the math library.
inline F exp_of(F x) {
  const F zero = {};
  const I is_zero = x < zero - 87.0f;
  const I is_big = x > zero + 88.0f;
  x = select(is_zero, zero - 87.0f, select(is_big, zero + 88.0f, x));
  const F round = zero + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const F shifted = madd(x, zero + 1.44269504f, round);
  const F n = shifted - round;
  F r = madd(n, zero - 0.693359375f, x);
  r = madd(n, zero + 2.12194440e-4f, r);
  F p = zero + 1.9875691500e-4f;
  p = madd(p, r, zero + 1.3981999507e-3f);
  p = madd(p, r, zero + 8.3334519073e-3f);
  p = madd(p, r, zero + 4.1665795894e-2f);
  p = madd(p, r, zero + 1.6666665459e-1f);
  p = madd(p, r, zero + 5.0000001201e-1f);
  p = madd(p, r * r, r) + 1.0f;
  const F power = (F)(((U)shifted - (U)round + 127u) << 23);
  return select(is_zero, zero, p * power);
}

inline F silu(F x) { return x / (exp_of(-x) + 1.0f); }

// 1 / sqrt(mean of squares + eps) over `size` values; h is zero from size to stride, a multiple of 16.
inline float inverse_rms(const float* h, int stride, int size, float eps) {
  F sum = {};
  for (int i = 0; i < stride; i += kLanes) sum = madd(load(h + i), load(h + i), sum);
  return 1.0f / __builtin_sqrtf(sum_of(sum) / static_cast<float>(size) + eps);
}

}  // namespace
}  // namespace faser
