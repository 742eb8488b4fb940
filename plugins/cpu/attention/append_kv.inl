namespace faser {
namespace {

typedef uint16_t __attribute__((may_alias)) Half;

// Norms (if it has a norm) and rotates one head with HF's half-split rope. out is zero from head_dim to padded_dim.
// inverse: 1 / rms of all heads, for a norm of all.
inline void rotate_head(const HeadShape& shape, const float* head, const float* norm, float inverse, const float* cos,
                        const float* sin, float* __restrict out) {
  alignas(64) float values[kMaxHeadDim];
  const int dim = shape.head_dim, half = dim / 2;
  for (int i = 0; i < dim; i++) values[i] = head[i];
  for (int i = dim; i < shape.padded_dim; i++) values[i] = 0;
  if (norm != nullptr && shape.norms_all_heads) {
    for (int i = 0; i < dim; i++) values[i] *= inverse * norm[i];
  } else if (norm != nullptr) {
    const F scale = F{} + inverse_rms(values, shape.padded_dim, dim, shape.rms_norm_eps);
    for (int i = 0; i < shape.padded_dim; i += kLanes) store(values + i, load(values + i) * scale * load(norm + i));
  }
  for (int i = 0; i < half; i++) {
    out[i] = values[i] * cos[i] - values[i + half] * sin[i];
    out[i + half] = values[i + half] * cos[i] + values[i] * sin[i];
  }
  for (int i = dim; i < shape.padded_dim; i++) out[i] = 0;
}

void append_kv(const HeadShape& shape, const float* qkv, const float* q_norm, const float* k_norm, const float* cos,
               const float* sin, void* queries, const KvLayer& kv, int block, int offset) {
  const int dim = shape.head_dim, padded = shape.padded_dim;
  const int q_size = shape.num_heads * dim, kv_size = shape.num_kv_heads * dim;
  const bool is_whole = shape.norms_all_heads;
  const float q_inverse = is_whole ? inverse_rms(qkv, q_size, q_size, shape.rms_norm_eps) : 0;
  const float k_inverse = is_whole ? inverse_rms(qkv + q_size, kv_size, kv_size, shape.rms_norm_eps) : 0;
  alignas(64) float head[kMaxHeadDim];
  Pair* query = static_cast<Pair*>(queries);
  for (int h = 0; h < shape.num_heads; h++, qkv += dim, query += padded / 2) {
    rotate_head(shape, qkv, is_whole ? q_norm + h * dim : q_norm, q_inverse, cos, sin, head);
    for (int i = 0; i < padded; i += kLanes) store_pairs(load(head + i), query + i / 2);
  }
  uint32_t* target = kv.base + block * kv.block_stride;
  const float* values = qkv + kv_size;
  for (int h = 0; h < shape.num_kv_heads; h++, qkv += dim, values += dim, target += kv.head_stride) {
    rotate_head(shape, qkv, is_whole ? k_norm + h * dim : k_norm, k_inverse, cos, sin, head);
    uint32_t* key =
        target + static_cast<size_t>(offset / kPageTokens) * (padded / 2) * kPageTokens + offset % kPageTokens;
    for (int i = 0; i < dim / 2; i++) key[i * kPageTokens] = bf16_of(head[2 * i]) | bf16_of(head[2 * i + 1]) << 16;
    Half* value = reinterpret_cast<Half*>(target + kv.value_offset + static_cast<size_t>(offset / 2) * padded);
    // The low half belongs to the even position, as in packed words.
    for (int i = 0; i < dim; i++) value[2 * i + offset % 2] = static_cast<uint16_t>(bf16_of(values[i]));
  }
}

}  // namespace
}  // namespace faser
