// Rows that several blocks process. A row of more than kPartEntries logits is split into parts of kPartEntries. A stage
// is a launch in which a block reads its part once, with all loads in flight, and holds it in registers. The last block
// of a row to arrive combines the results of the parts with integer sums, minima and maxima only, so that the outcome
// does not depend on the parts or their order.
#ifndef FASER_CUDA_SAMPLING_PARTS_CUH_
#define FASER_CUDA_SAMPLING_PARTS_CUH_

#include <cstdint>

#include "block.cuh"
#include "sampling/filter.cuh"
#include "sampling/philox.cuh"
#include "sampling/probs.cuh"

// Entries of a part per thread, a multiple of 4; tests may compile with fewer.
#ifndef FASER_THREAD_ENTRIES
#define FASER_THREAD_ENTRIES 16
#endif

namespace faser {

constexpr int kThreadEntries = FASER_THREAD_ENTRIES;
constexpr int kPartEntries = kThreads * kThreadEntries;
constexpr int kMaxRacers = 16;
constexpr int kNumBest = 8;
constexpr uint64_t kBadRank = ~uint64_t{0};
constexpr int kBucketsPerNat = kBuckets / 16;
static_assert(kThreadEntries % 4 == 0 && kPartEntries % 64 == 0, "a counter serves four tokens, sixteen of them 64");

// The launches in their order. The first processes all rows, the others process the rows that are listed for them.
enum Stage : int32_t {
  kScan,   // finds the best entries, and decides what one pass over a row can
  kWeigh,  // adds up the weights, or finds the buckets in which top_k and top_p cut
  kRank,   // finds the cut
  kDraw,   // draws a token
  kWhole,  // does the whole row in one block
  kNumStages,
};

struct PartRecord {
  uint64_t rank[kNumBest];  // of the best entries, best first; accept: only the first; kBadRank for NaN or +inf
  uint64_t mass;
  int64_t num_racers;
  int32_t racers[kMaxRacers];
};

// The state of a row between stages. Must be zero before the first launch; every launch leaves `arrived` zero.
struct RowWork {
  uint32_t arrived;
  int32_t listed[kNumStages];  // row i of the workspace holds entry i of each stage's list of rows
  int32_t slot, position;
  bool has_draft, is_edited;
  RowProbs probs;
  int32_t first_bucket, last_bucket;
  uint32_t top_k;  // 0 if it removes nothing
  uint32_t num_before, num_members;
  uint64_t mass_before, whole_mass;
  uint64_t best[kNumBest];
  uint32_t count[kBuckets];
  unsigned long long mass[kBuckets];
  uint64_t member_rank[kMaxRanked], member_mass[kMaxRanked];
};

// The sizes that the host reserves (ops/cuda/accept.py).
static_assert(sizeof(RowWork) <= 10432 && sizeof(PartRecord) <= 144);

// The memory that the stages share. Its layout does not depend on the number of rows.
struct Workspace {
  char* base;
  int32_t num_parts;

  __device__ Workspace(void* memory, int32_t vocab_size)
      : base(static_cast<char*>(memory)), num_parts(ceil_div(vocab_size, kPartEntries)) {}

  __device__ uint32_t* num_listed(Stage stage) const { return reinterpret_cast<uint32_t*>(base) + stage; }
  __device__ RowWork& row(int32_t row) const {
    return *reinterpret_cast<RowWork*>(base + 64 + row * (sizeof(RowWork) + num_parts * sizeof(PartRecord)));
  }
  __device__ PartRecord* parts(int32_t row) const { return reinterpret_cast<PartRecord*>(&this->row(row) + 1); }

  // One thread calls it, in a stage before `stage`. The first stage may list rows for kWeigh only.
  __device__ void list(Stage stage, int32_t row) const {
    this->row(static_cast<int32_t>(atomicAdd(num_listed(stage), 1u))).listed[stage] = row;
  }

  // One block of the first stage calls it: clears the lists of all stages after kWeigh.
  __device__ void begin() const {
    if (threadIdx.x > kWeigh && threadIdx.x < kNumStages) *num_listed(static_cast<Stage>(threadIdx.x)) = 0;
  }

  // All threads of a block call f(row, part) for each part of the rows that are listed for the stage, and once per row
  // for kWhole.
  template <Stage kStage, typename F>
  __device__ void for_each_listed(F f) const {
    if (kStage == kDraw && blockIdx.x == 0 && threadIdx.x == 0) *num_listed(kWeigh) = 0;
    const int32_t num_each = kStage == kWhole ? 1 : num_parts;
    const int32_t num_items = static_cast<int32_t>(*num_listed(kStage)) * num_each;
    for (int32_t item = blockIdx.x; item < num_items; item += gridDim.x) {
      f(row(item / num_each).listed[kStage], item % num_each);
      __syncthreads();  // untested: f works without it only because of the layout of shared memory
    }
  }
};

// Returns the largest value of all threads, NaN left out, to every thread.
__device__ inline float block_max(float value) {
  __shared__ float warp_values[kWarps];
  value = warp_max(value);
  if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_values[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = fmaxf(value, warp_values[warp]);
  __syncthreads();
  return value;
}

// The end of the part that begins at `begin`, in a row of n entries.
__device__ inline int32_t part_end(int32_t begin, int32_t n) {
  return n - begin < kPartEntries ? n : begin + kPartEntries;
}

// A thread's entries of a part, in ascending order: the tokens whose seeded noise comes from the thread's Philox
// counters. Entries past the end of the row are -inf.
struct PartEntries {
  float value[kThreadEntries];
  int32_t first;

  template <typename T>
  __device__ PartEntries(const Row<T>& row, int32_t part) {
    first = part * kPartEntries + gumbel_token_of(static_cast<int32_t>(threadIdx.x), 0);
    if (row.edited != nullptr) {
      load(row.edited, row.n);
    } else {
      load(row.logits, row.n);
    }
  }

  __device__ int32_t id(int i) const { return first + i / 4 * (4 * kThreads) + i % 4 * 16; }
  __device__ int32_t counter(int i) const { return (first / 64 * 16 + first % 64) + i / 4 * kThreads; }

 private:
  template <typename T>
  __device__ void load(const T* entries, int32_t n) {
#pragma unroll
    for (int i = 0; i < kThreadEntries; ++i) {
      value[i] = -INFINITY;
      if (id(i) < n) value[i] = to_float(entries[id(i)]);
    }
  }
};

// Starts to load a part into L2, before the parameters of its request are read.
template <typename T>
__device__ void prefetch_part(const Row<T>& row, int32_t part) {
  const int32_t first = part * kPartEntries + static_cast<int32_t>(threadIdx.x) * kThreadEntries;
  if (first < row.n) prefetch_line(row.logits + first);
}

// The largest rank below `bound` among the thread's entries, 0 if there is none.
__device__ inline uint64_t best_below(const PartEntries& entries, uint64_t bound) {
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const uint64_t rank = rank_of(entries.value[i], entries.id(i));
    if (rank < bound) best = Max()(best, rank);
  }
  return best;
}

// The largest of the thread's entries; infinity if one is NaN or +inf.
__device__ inline float largest_of(const PartEntries& entries) {
  float largest = entries.value[0];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    finite &= entries.value[i] < INFINITY;
    largest = fmaxf(largest, entries.value[i]);
  }
  return finite ? largest : INFINITY;
}

// The lowest id among the thread's entries with this value; there must be one.
__device__ inline int32_t id_of(const PartEntries& entries, float value) {
  int32_t id = 0;
#pragma unroll
  for (int i = kThreadEntries - 1; i >= 0; --i) {
    if (entries.value[i] == value) id = entries.id(i);
  }
  return id;
}

// The sum of exact masses over the part's entries, for every thread. mass: (value, id) -> uint64, 0 for -inf.
template <typename Mass>
__device__ uint64_t part_sum(const PartEntries& entries, Mass mass) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) sum += mass(entries.value[i], entries.id(i));
  return block_reduce(sum, Sum());
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_PARTS_CUH_
