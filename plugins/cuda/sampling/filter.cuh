// Top-k and top-p without sorting a row: the cut is found digit by digit of an order-preserving key, each level a
// histogram over the row, until the bucket that holds the cut is small enough to rank.
//
// The first levels take digits of the depth in nats, since logits spread evenly over it (and so over shared memory);
// later levels take digits of the rank, which is unique, so that any number of ties is resolved.
#ifndef FASER_CUDA_SAMPLING_FILTER_CUH_
#define FASER_CUDA_SAMPLING_FILTER_CUH_

#include "block.cuh"
#include "sampling/probs.cuh"

namespace faser {

__host__ __device__ constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

constexpr int kDigitBits = log2_of(kThreads);
constexpr int kBuckets = 1 << kDigitBits;
constexpr int kNumDepthDigits = 2;
constexpr int kMaxRanked = 256;  // members that are compared pairwise
static_assert(kBuckets == kThreads, "each thread looks after one bucket");

struct Histogram {
  uint32_t count[kBuckets];
  uint32_t mass_low[kBuckets], mass_high[kBuckets];

  __device__ void clear() { count[threadIdx.x] = mass_low[threadIdx.x] = mass_high[threadIdx.x] = 0; }

  // Two 32-bit additions with a carry: shared memory has no 64-bit one. The sums are exact in any order.
  __device__ void add(int bucket, uint64_t mass, uint32_t num_entries = 1) {
    atomicAdd(&count[bucket], num_entries);
    if (mass == 0) return;
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t before = atomicAdd(&mass_low[bucket], low);
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + (before + low < before ? 1u : 0u);
    if (high != 0) atomicAdd(&mass_high[bucket], high);
  }

  __device__ uint64_t mass(int bucket) const {
    return (static_cast<uint64_t>(mass_high[bucket]) << 32) | mass_low[bucket];
  }
};

struct FilterShared {
  Histogram histogram;
  uint64_t rank[kMaxRanked], mass[kMaxRanked];
  uint64_t before, cut;
  uint32_t num_members;
  int chosen;
};

// The leading digits that the members of a bucket share: of the depth, then of the rank.
struct Prefix {
  uint32_t depth = 0;
  uint64_t rank = 0;
  int depth_shift = 32, rank_shift = 64;

  static __device__ uint64_t leading(uint64_t value, int shift) { return shift >= 64 ? 0 : value >> shift; }

  static __device__ uint32_t depth_key(float depth) { return static_cast<uint32_t>(depth * 33554432.0f); }

  __device__ bool holds(float entry_depth, uint64_t entry_rank) const {
    return leading(depth_key(entry_depth), depth_shift) == depth && leading(entry_rank, rank_shift) == rank;
  }

  __device__ bool by_depth() const { return depth_shift > 32 - kNumDepthDigits * kDigitBits; }

  __device__ int digit_bits() const {
    const int left = by_depth() ? depth_shift : rank_shift;
    return left < kDigitBits ? left : kDigitBits;
  }

  // The bucket of a member, better ones first.
  __device__ int bucket(float entry_depth, uint64_t entry_rank) const {
    const int bits = digit_bits();
    const uint32_t mask = (1u << bits) - 1;
    if (by_depth()) return static_cast<int>((depth_key(entry_depth) >> (depth_shift - bits)) & mask);
    return static_cast<int>(mask - (static_cast<uint32_t>(entry_rank >> (rank_shift - bits)) & mask));
  }

  __device__ void descend(int chosen) {
    const int bits = digit_bits();
    if (by_depth()) {
      depth_shift -= bits;
      depth = (depth << bits) | static_cast<uint32_t>(chosen);
    } else {
      rank_shift -= bits;
      rank = (bits < 64 ? rank << bits : 0) | (((1u << bits) - 1) - static_cast<uint32_t>(chosen));
    }
  }
};

// Calls f(rank, weight, depth) for the entries of nonzero weight that survive the cut and match the prefix.
template <typename T, typename F>
__device__ void for_each_member(const Row<T>& row, const RowProbs& probs, const Prefix& prefix, F f) {
  for_each_entry(row, [&](int32_t id, float value) {
    const float weight = probs.weight(value, id);
    if (!(weight > 0.0f)) return;
    const float depth = probs.depth(value);
    const uint64_t rank = rank_of(value, id);
    if (prefix.holds(depth, rank)) f(rank, weight, depth);
  });
}

// Moves the cut so that the best top_k entries remain (top_p >= 1), or the smallest set of best entries that holds
// top_p of the mass (top_p < 1). No effect if that is all of them. It may be called again at once; for another use of
// `shared` all threads must have met in between.
template <typename T>
__device__ void tighten(const Row<T>& row, int32_t top_k, float top_p, RowProbs* probs, FilterShared* shared) {
  const bool by_mass = top_p < 1.0f;
  const int shift = weight_shift(row.n);
  Prefix prefix;
  uint64_t wanted = static_cast<uint64_t>(top_k);
  for (bool first = true;; first = false) {
    shared->histogram.clear();
    if (threadIdx.x == 0) shared->chosen = -1;
    __syncthreads();
    for_each_member(row, *probs, prefix, [&](uint64_t rank, float weight, float depth) {
      shared->histogram.add(prefix.bucket(depth, rank), by_mass ? fixed_of(weight, shift) : 0);
    });
    __syncthreads();
    const int bucket = threadIdx.x;
    const uint64_t own = by_mass ? shared->histogram.mass(bucket) : shared->histogram.count[bucket];
    uint64_t total;
    const uint64_t before = block_exclusive_sum(own, &total);
    if (first && by_mass) wanted = mass_wanted(top_p, total);
    if (first && !by_mass && wanted >= total) return;
    if (before < wanted && wanted <= before + own) {
      shared->chosen = bucket;
      shared->before = before;
    }
    __syncthreads();
    const int chosen = shared->chosen;
    if (chosen < 0) return;  // only for a distribution without mass
    wanted -= shared->before;
    const uint32_t num_members = shared->histogram.count[chosen];
    prefix.descend(chosen);
    __syncthreads();
    if (num_members <= kMaxRanked) break;
  }

  if (threadIdx.x == 0) {
    shared->num_members = 0;
    shared->cut = probs->cut;
  }
  __syncthreads();
  for_each_member(row, *probs, prefix, [&](uint64_t rank, float weight, float) {
    const uint32_t place = atomicAdd(&shared->num_members, 1u);
    if (place >= kMaxRanked) return;  // only if the row changes while it is read
    shared->rank[place] = rank;
    shared->mass[place] = by_mass ? fixed_of(weight, shift) : 1;
  });
  __syncthreads();
  const uint32_t num_members = shared->num_members < kMaxRanked ? shared->num_members : kMaxRanked;
  for (uint32_t member = threadIdx.x; member < num_members; member += kThreads) {
    uint64_t before = 0;
    for (uint32_t other = 0; other < num_members; ++other) {
      if (shared->rank[other] > shared->rank[member]) before += shared->mass[other];
    }
    if (before < wanted && wanted <= before + shared->mass[member]) shared->cut = shared->rank[member];
  }
  __syncthreads();
  probs->cut = shared->cut;
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_FILTER_CUH_
