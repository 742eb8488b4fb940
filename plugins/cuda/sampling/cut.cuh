// The probabilities of a row that several blocks process. The cut of top_k and top_p takes two stages: each block adds
// its part's histogram of the depth to the row's; then the blocks collect the members of the bucket that holds the cut,
// and the last block ranks them.
#ifndef FASER_CUDA_SAMPLING_CUT_CUH_
#define FASER_CUDA_SAMPLING_CUT_CUH_

#include "sampling/distribution.cuh"
#include "sampling/filter.cuh"
#include "sampling/parts.cuh"
#include "sampling/sampling.cuh"

namespace faser {

struct CutShared {
  union {
    Histogram histogram;
    struct {
      uint64_t rank[kMaxRanked], mass[kMaxRanked];
    } members;
  };
  int32_t chosen;
  uint64_t kept_mass[2], cut[2];
};

enum Cut { kNoCut, kFewMembers, kManyMembers };

__device__ inline bool has_top_k(const Sampling& s, int32_t n) { return s.top_k > 0 && s.top_k < n; }
__device__ inline bool has_top_p(const Sampling& s) { return s.top_p < 1.0f; }

// Better entries have lower buckets.
__device__ inline int32_t bucket_of_depth(float depth) {
  return static_cast<int32_t>(fminf(depth * static_cast<float>(kBucketsPerNat), static_cast<float>(kBuckets - 1)));
}

// Zeroes the part's share of the row's histogram, in a stage before the one that fills it.
__device__ inline void clear_histogram(RowWork* work, int32_t part, int32_t num_parts) {
  for (int32_t i = part * kThreads + threadIdx.x; i < kBuckets; i += num_parts * kThreads) {
    work->count[i] = 0;
    work->mass[i] = 0;
  }
}

// Every block of the row adds its part's histogram to the row's.
__device__ inline void add_histogram(const PartEntries& entries, const RowProbs& probs, int shift, RowWork* work,
                                     CutShared* shared) {
  Histogram& histogram = shared->histogram;
  histogram.clear();
  __syncthreads();
  // Most entries may be in the last bucket.
  uint32_t num_last = 0;
  uint64_t last_mass = 0;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const float weight = probs.weight(entries.value[i], entries.id(i));
    if (!(weight > 0.0f)) continue;
    const int32_t bucket = bucket_of_depth(probs.depth(entries.value[i]));
    if (bucket < kBuckets - 1) {
      histogram.add(bucket, fixed_of(weight, shift));
    } else {
      ++num_last;
      last_mass += fixed_of(weight, shift);
    }
  }
  if (num_last > 0) histogram.add(kBuckets - 1, last_mass, num_last);
  __syncthreads();
  const int bucket = threadIdx.x;
  if (histogram.count[bucket] == 0) return;
  atomicAdd(&work->count[bucket], histogram.count[bucket]);
  atomicAdd(&work->mass[bucket], static_cast<unsigned long long>(histogram.mass(bucket)));
}

// The row's last block finds the buckets whose members decide where the cut is. Returns whether there is a cut, and
// whether these members are few enough to rank.
__device__ inline Cut choose_buckets(const Sampling& s, int32_t n, RowWork* work, CutShared* shared) {
  if (threadIdx.x == 0) shared->chosen = -1;
  const uint64_t own_count = work->count[threadIdx.x], own_mass = work->mass[threadIdx.x];
  uint64_t num_all, whole_mass;
  const uint64_t num_before = block_exclusive_sum(own_count, &num_all);
  const uint64_t mass_before = block_exclusive_sum(own_mass, &whole_mass);
  const bool by_count = has_top_k(s, n) && static_cast<uint64_t>(s.top_k) < num_all, by_mass = has_top_p(s);
  if (!by_count && !by_mass) {
    if (threadIdx.x == 0) work->whole_mass = whole_mass;
    __syncthreads();
    return kNoCut;
  }
  const uint64_t wanted = by_count ? static_cast<uint64_t>(s.top_k) : mass_wanted(s.top_p, whole_mass);
  const uint64_t before = by_count ? num_before : mass_before, own = by_count ? own_count : own_mass;
  if (before < wanted && wanted <= before + own) shared->chosen = threadIdx.x;
  __syncthreads();
  const int32_t last = shared->chosen;
  if (last < 0) return kManyMembers;  // only for a distribution without mass
  // top_p may cut anywhere in what top_k leaves.
  const int32_t first = by_count && by_mass ? 0 : last, bucket = static_cast<int32_t>(threadIdx.x);
  if (bucket == first) {
    work->first_bucket = first;
    work->last_bucket = last;
    work->top_k = by_count ? static_cast<uint32_t>(s.top_k) : 0;
    work->num_before = static_cast<uint32_t>(num_before);
    work->num_members = 0;
    work->mass_before = mass_before;
    work->whole_mass = whole_mass;
  }
  const uint64_t num_members = block_reduce(bucket >= first && bucket <= last ? own_count : 0, Sum());
  return num_members <= kMaxRanked ? kFewMembers : kManyMembers;
}

// Every block of the row adds its part's members of the chosen buckets, in the stage after choose_buckets().
__device__ inline void add_members(const PartEntries& entries, const RowProbs& probs, int shift, RowWork* work) {
  const int32_t first = work->first_bucket, last = work->last_bucket;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const float depth = probs.depth(entries.value[i]);
    if (!(depth <= kMaxDepth)) continue;
    const int32_t bucket = bucket_of_depth(depth);
    if (bucket < first || bucket > last) continue;
    const uint32_t place = atomicAdd(&work->num_members, 1u);
    if (place >= kMaxRanked) continue;  // only if the row changes while it is read
    work->member_rank[place] = rank_of(entries.value[i], entries.id(i));
    work->member_mass[place] = fixed_of(probs.weight(entries.value[i], entries.id(i)), shift);
  }
}

// The row's last block writes the cut, and returns the mass that the cut keeps.
__device__ inline uint64_t rank_members(const Sampling& s, const RowWork& work, uint64_t* cut, CutShared* shared) {
  const uint32_t num_members = work.num_members < kMaxRanked ? work.num_members : kMaxRanked;
  for (uint32_t i = threadIdx.x; i < num_members; i += kThreads) {
    shared->members.rank[i] = work.member_rank[i];
    shared->members.mass[i] = work.member_mass[i];
  }
  if (threadIdx.x < 2) shared->kept_mass[threadIdx.x] = shared->cut[threadIdx.x] = 0;
  __syncthreads();
  const int begin = work.top_k > 0 ? 0 : 1, end = has_top_p(s) ? 2 : 1;
  for (int pass = begin; pass < end; ++pass) {  // top_k, then top_p
    const uint64_t wanted =
        pass == 0 ? work.top_k : mass_wanted(s.top_p, begin == 0 ? shared->kept_mass[0] : work.whole_mass);
    for (uint32_t i = threadIdx.x; i < num_members; i += kThreads) {
      const uint64_t rank = shared->members.rank[i], own_mass = shared->members.mass[i];
      uint64_t count = work.num_before, mass = work.mass_before;
      for (uint32_t other = 0; other < num_members; ++other) {
        const bool is_better = shared->members.rank[other] > rank;
        count += is_better ? 1 : 0;
        mass += is_better ? shared->members.mass[other] : 0;
      }
      const uint64_t before = pass == 0 ? count : mass, own = pass == 0 ? 1 : own_mass;
      if (before < wanted && wanted <= before + own) {
        shared->cut[pass] = rank;
        shared->kept_mass[pass] = mass + own_mass;
      }
    }
    __syncthreads();
  }
  *cut = shared->cut[end - 1];
  return shared->kept_mass[end - 1];
}

__device__ inline bool has_cut(const Sampling& s, int32_t n) { return has_top_k(s, n) || has_top_p(s); }

// kWeigh: adds up the row's weights, or fills its histogram if top_k or top_p applies. All fields of probs but cut and
// scale are known before. Returns true in the row's last block if probs is complete; if the row takes another stage, it
// lists the row for that and returns false.
template <typename T>
__device__ bool weigh_part(const Workspace& workspace, int32_t row, int32_t part, const Sampling& s,
                           const Row<T>& logits, const PartEntries& entries, RowProbs* probs, CutShared* shared) {
  RowWork& work = workspace.row(row);
  PartRecord* parts = workspace.parts(row);
  const int shift = weight_shift(logits.n);
  const bool cuts = has_cut(s, logits.n);
  if (cuts) {
    add_histogram(entries, *probs, shift, &work, shared);
  } else {
    const uint64_t sum =
        part_sum(entries, [&](float x, int32_t id) { return fixed_of(probs->kept_weight(x, id), shift); });
    if (threadIdx.x == 0) parts[part].mass = sum;
  }
  const bool is_last = cuts ? is_last_block<true>(&work.arrived, workspace.num_parts)
                            : is_last_block<false>(&work.arrived, workspace.num_parts);
  if (!is_last) return false;
  uint64_t mass = 0;
  if (cuts) {
    const Cut cut = choose_buckets(s, logits.n, &work, shared);
    if (cut != kNoCut || s.has_floor()) {
      // A floor takes one more pass over the row than the stages have, so one block does the whole row.
      if (threadIdx.x == 0) workspace.list(cut == kManyMembers || s.has_floor() ? kWhole : kRank, row);
      return false;
    }
    mass = work.whole_mass;
  } else {
    for (int32_t i = threadIdx.x; i < workspace.num_parts; i += kThreads) mass += parts[i].mass;
    mass = block_reduce(mass, Sum());
  }
  probs->scale = scale_of(mass, shift);
  return true;
}

// kRank: finds the cut and the scale. Returns true in the row's last block, whose probs is complete then.
__device__ inline bool rank_part(const Workspace& workspace, int32_t row, const Sampling& s, int32_t n,
                                 const PartEntries& entries, RowProbs* probs, CutShared* shared) {
  RowWork& work = workspace.row(row);
  const int shift = weight_shift(n);
  add_members(entries, *probs, shift, &work);
  if (!is_last_block<true>(&work.arrived, workspace.num_parts)) return false;
  probs->scale = scale_of(rank_members(s, work, &probs->cut, shared), shift);
  return true;
}

// kDraw of an unseeded token: the row's last block draws it by integer masses, whose sums are in the parts' records.
// Returns the token, -1 if there is no mass. mass: token -> uint64.
template <typename Mass>
__device__ int32_t draw_among_parts(const PartRecord* parts, int32_t num_parts, int32_t n, uint64_t bits, Mass mass,
                                    DrawShared* shared) {
  uint64_t total = 0;
  for (int32_t i = 0; i < num_parts; ++i) total += parts[i].mass;
  if (total == 0) return -1;
  uint64_t wanted = drawn_mass(bits, total);
  int32_t chosen = 0;
  for (; chosen < num_parts - 1 && parts[chosen].mass <= wanted; ++chosen) wanted -= parts[chosen].mass;
  const int32_t begin = chosen * kPartEntries;
  return find_mass(begin, part_end(begin, n), wanted, mass, shared);
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_CUT_CUH_
