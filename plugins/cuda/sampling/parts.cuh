// Rows by several blocks: a row of more than kPartEntries logits is cut into parts of so many, each read once per stage
// by a block that holds it in registers, all loads at once. Stages are launches; the last block of a row to arrive adds
// up what its parts found, by integers and minima alone, so that results do not depend on the parts or their order.
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

// Launches, one after the other: the first looks at all rows, the others at those that are listed for them.
enum Stage : int32_t {
  kScan,   // the best entries, and what one look at a row decides
  kWeigh,  // the mass of its weights, or where about top_k and top_p cut
  kRank,   // the cut
  kDraw,   // a token
  kWhole,  // all of it, by one block
  kNumStages,
};

struct PartRecord {
  uint64_t rank[kNumBest];  // of the best entries, best first, only the first for accept; kBadRank for NaN or +inf
  uint64_t mass;
  int64_t num_racers;
  int32_t racers[kMaxRacers];
};

// Zero before the first launch; every launch leaves `arrived` zero.
struct RowWork {
  uint32_t arrived;
  int32_t listed[kNumStages];  // entry i of a stage's list of rows is in the workspace's row i
  int32_t slot, position;
  bool has_draft, is_edited;
  RowProbs probs;
  int32_t first_bucket, last_bucket;
  uint32_t top_k;  // 0 if it cuts nothing
  uint32_t num_before, num_members;
  uint64_t mass_before, whole_mass;
  uint64_t best[kNumBest];
  uint32_t count[kBuckets];
  unsigned long long mass[kBuckets];
  uint64_t member_rank[kMaxRanked], member_mass[kMaxRanked];
};

// What the host reserves (ops/cuda/accept.py).
static_assert(sizeof(RowWork) <= 10432 && sizeof(PartRecord) <= 144);

// For any number of rows, so that a row's place does not depend on it.
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

  // By one thread, in a stage before that one; only kWeigh is listed for by the first stage.
  __device__ void list(Stage stage, int32_t row) const {
    this->row(static_cast<int32_t>(atomicAdd(num_listed(stage), 1u))).listed[stage] = row;
  }

  // By one block of the first stage.
  __device__ void begin() const {
    if (threadIdx.x > kWeigh && threadIdx.x < kNumStages) *num_listed(static_cast<Stage>(threadIdx.x)) = 0;
  }

  // Calls f(row, part) by all threads of a block, for each part of the rows that are listed for the stage; of whole
  // rows once.
  template <Stage kStage, typename F>
  __device__ void for_each_listed(F f) const {
    if (kStage == kDraw && blockIdx.x == 0 && threadIdx.x == 0) *num_listed(kWeigh) = 0;
    const int32_t num_each = kStage == kWhole ? 1 : num_parts;
    const int32_t num_items = static_cast<int32_t>(*num_listed(kStage)) * num_each;
    for (int32_t item = blockIdx.x; item < num_items; item += gridDim.x) {
      f(row(item / num_each).listed[kStage], item % num_each);
      __syncthreads();
    }
  }
};

// Whether this block is the last of so many to get here; it then sees what the others wrote before. kByAll: each thread
// vouches for its own writes; else the first does for all that the threads wrote before they last met. All threads of
// the block must call it.
template <bool kByAll>
__device__ bool is_last_block(uint32_t* arrived, int32_t num_blocks) {
  bool is_last = false;
  if (kByAll || threadIdx.x == 0) {
    __threadfence();
    const uint32_t num_each = kByAll ? kThreads : 1;
    is_last = atomicAdd(arrived, 1u) + 1 == static_cast<uint32_t>(num_blocks) * num_each;
    if (is_last) __threadfence();
  }
  if (!__syncthreads_or(is_last)) return false;
  if (is_last) *arrived = 0;
  return true;
}

// Every thread gets the largest number, not NaN, of all.
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

// Behind the last entry of the part that begins there.
__device__ inline int32_t part_end(int32_t begin, int32_t n) {
  return n - begin < kPartEntries ? n : begin + kPartEntries;
}

// A thread's entries of a part: those of the words of its counters of seeded noise, in ascending order. Beyond the row
// they are -inf.
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

// Starts to bring a part into L2, before it is known what for.
template <typename T>
__device__ void prefetch_part(const Row<T>& row, int32_t part) {
  const int32_t first = part * kPartEntries + static_cast<int32_t>(threadIdx.x) * kThreadEntries;
  if (first < row.n) prefetch_line(row.logits + first);
}

// The rank of the thread's best entry that is below `bound`; 0 if there is none.
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

// The lowest id of an entry with this value, of which the thread has one.
__device__ inline int32_t id_of(const PartEntries& entries, float value) {
  int32_t id = 0;
#pragma unroll
  for (int i = kThreadEntries - 1; i >= 0; --i) {
    if (entries.value[i] == value) id = entries.id(i);
  }
  return id;
}

// Sums exact masses over the part's entries into the block's sum. mass: (value, id) -> uint64, 0 for -inf.
template <typename Mass>
__device__ uint64_t part_sum(const PartEntries& entries, Mass mass) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) sum += mass(entries.value[i], entries.id(i));
  return block_reduce(sum, Sum());
}

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_PARTS_CUH_
