// CUDA on the CPU for tests: the kernels of plugins/cuda compiled by a host compiler and run as they are.
//
// A block's threads are fibers on one thread of the machine; a fiber runs until it waits for others (a barrier, a
// warp's collective), then the next one runs, in an order that launch() is given, so that a missing barrier shows in
// one of the orders. Copies by cp.async happen when they are waited for, and until then their destination holds NaNs, as
// shared memory does when a block begins.
// Blocks run one after the other. What this cannot show: speed, bank conflicts, memory ordering between blocks.
#ifndef FASER_CUDA_EMULATOR_H_
#define FASER_CUDA_EMULATOR_H_

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#undef __shared__
#define __shared__ static __attribute__((section("faser_shared")))
#undef __global__
#define __global__ __attribute__((visibility("default")))
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __restrict__
#define __restrict__ __restrict

// The linker's names for where that section begins and ends; nullptr in a file without shared memory.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_faser_shared[], __stop_faser_shared[];

struct EmulatedIndex {
  unsigned x, y, z;
};
inline EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kDepositBytes = 64;

struct Copy {
  void* target;
  const void* source;
  bool valid;
};

// A meeting of the lanes in a mask. Two buffers: a lane deposits for the next meeting while others still read this one.
struct Meeting {
  alignas(16) unsigned char deposit[2][kLanes][kDepositBytes];
  uint64_t arrived = 0, finished = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  EmulatedIndex index;
  bool started = false, done = false;
  std::map<unsigned, uint64_t> meetings_joined;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

struct Block {
  std::vector<Fiber> fibers;
  std::map<unsigned, Meeting> meetings[32];
  unsigned waiting_at_barrier = 0, num_done = 0;
  uint64_t barrier_generation = 0, progress = 0;
  int barrier_any = 0, barrier_result = 0;
};

using Entry = void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

inline Block* block;
inline Fiber* current;
inline jmp_buf scheduler;
inline Entry entry;
inline const uint64_t* arguments;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s in block (%u, %u, %u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z);
  std::abort();
}

inline void yield() {
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

inline void release_barrier() {
  block->waiting_at_barrier = 0;
  block->barrier_generation++;
  block->barrier_result = block->barrier_any;
  block->barrier_any = 0;
  block->progress++;
}

inline void run_fiber() {
  const uint64_t* a = arguments;
  entry(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
  current->done = true;
  block->num_done++;
  block->progress++;
  const unsigned live = static_cast<unsigned>(block->fibers.size()) - block->num_done;
  if (live > 0 && block->waiting_at_barrier == live) release_barrier();
  _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline unsigned linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

inline unsigned lane() { return linear_thread() % kLanes; }

// Every lane of the mask gives a value; the function then gets all of them, by lane.
template <typename In, typename Function>
auto meet(unsigned mask, const In& in, Function function) {
  static_assert(sizeof(In) <= kDepositBytes);
  const unsigned me = lane();
  if (!(mask >> me & 1)) fail("a lane outside the mask of its collective");
  Meeting& meeting = block->meetings[linear_thread() / kLanes][mask];
  const uint64_t round = current->meetings_joined[mask]++;
  auto* deposits = meeting.deposit[round % 2];
  std::memcpy(deposits[me], &in, sizeof in);
  const uint64_t members = __builtin_popcount(mask);
  meeting.arrived++;
  block->progress++;
  while (meeting.arrived < (round + 1) * members) yield();
  return function([deposits](unsigned lane) {
    In value;
    std::memcpy(&value, deposits[lane], sizeof value);
    return value;
  });
}

inline int barrier(int predicate) {
  const uint64_t generation = block->barrier_generation;
  block->barrier_any |= predicate;
  block->progress++;
  if (++block->waiting_at_barrier == block->fibers.size() - block->num_done) {
    release_barrier();
  } else {
    while (block->barrier_generation == generation) yield();
  }
  return block->barrier_result;
}

inline void copy_now(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(copy.target, copy.source, 16);
  } else {
    std::memset(copy.target, 0, 16);
  }
}

// order 0: threads ascending; 1: descending; else a permutation that changes every round.
inline void run_block(unsigned order) {
  const size_t num_threads = size_t{blockDim.x} * blockDim.y * blockDim.z;
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < num_threads) stacks.emplace_back(new char[kStackBytes]);
  if (__start_faser_shared != nullptr) {
    std::memset(__start_faser_shared, 0xff, static_cast<size_t>(__stop_faser_shared - __start_faser_shared));
  }
  Block state;
  block = &state;
  state.fibers.resize(num_threads);
  std::vector<size_t> turn(num_threads);
  for (size_t i = 0; i < num_threads; i++) {
    Fiber& fiber = state.fibers[i];
    fiber.index = {static_cast<unsigned>(i % blockDim.x), static_cast<unsigned>(i / blockDim.x % blockDim.y),
                   static_cast<unsigned>(i / blockDim.x / blockDim.y)};
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks[i].get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
    turn[i] = order == 1 ? num_threads - 1 - i : i;
  }
  uint64_t seed = order;
  while (state.num_done < num_threads) {
    if (order > 1) {
      for (size_t i = num_threads - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(turn[i], turn[(seed >> 33) % (i + 1)]);
      }
    }
    const uint64_t before = state.progress;
    for (size_t i : turn) {
      if (!state.fibers[i].done) resume(state.fibers[i]);
    }
    if (state.progress == before && state.num_done < num_threads) fail("threads wait for each other (a deadlock)");
  }
}

}  // namespace emulator

// Runs a kernel whose arguments are pointers and integers, each widened to 64 bits (at most 32 of them).
// Not inline, so that it is there although nothing calls it: a library is one file.
extern "C" void emulator_launch(void* kernel, const unsigned grid[3], const unsigned threads[3],
                                const uint64_t arguments[32], unsigned order) {
  emulator::entry = reinterpret_cast<emulator::Entry>(kernel);
  emulator::arguments = arguments;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads[0], threads[1], threads[2]};
  for (unsigned z = 0; z < grid[2]; z++) {
    for (unsigned y = 0; y < grid[1]; y++) {
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        emulator::run_block(order);
      }
    }
  }
}

// Of the virtual GPU's driver (tests/virtual_gpu), where there is one; otherwise a handle is an address.
extern "C" __attribute__((weak)) int virtual_gpu_set_conditional(void* handle, unsigned value);
inline void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
  void* target = reinterpret_cast<void*>(handle);
  if (virtual_gpu_set_conditional != nullptr) {
    virtual_gpu_set_conditional(target, value);
  } else {
    std::memcpy(target, &value, sizeof value);
  }
}

inline void __syncthreads() { emulator::barrier(0); }
inline int __syncthreads_or(int predicate) { return emulator::barrier(predicate != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::meet(mask, 0, [](auto) { return 0; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = emulator::lane();
  return emulator::meet(mask, value, [&](auto of) { return of(lane / width * width + source % width); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  const unsigned lane = emulator::lane();
  return emulator::meet(mask, value, [&](auto of) { return of(lane ^ bits); });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, unsigned width = 32) {
  const unsigned lane = emulator::lane();
  return emulator::meet(mask, value, [&](auto of) { return of(lane % width < delta ? lane : lane - delta); });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, unsigned width = 32) {
  const unsigned lane = emulator::lane();
  return emulator::meet(mask, value, [&](auto of) { return of(lane % width + delta >= width ? lane : lane + delta); });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulator::meet(mask, predicate, [&](auto of) {
    unsigned votes = 0;
    for (int l = 0; l < emulator::kLanes; l++) {
      if ((mask >> l & 1) && of(l)) votes |= 1u << l;
    }
    return votes;
  });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  *address = std::max(old, value);
  return old;
}
template <typename T>
T atomicMin(T* address, T value) {
  const T old = *address;
  *address = std::min(old, value);
  return old;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(__float_as_int(value)); }
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }

namespace faser {

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline void cp_async_16(void* shared, const void* source, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % 16) emulator::fail("cp.async to an address that is not aligned to 16");
  if (valid && reinterpret_cast<uintptr_t>(source) % 16) emulator::fail("cp.async from an unaligned address");
  std::memset(shared, 0xff, 16);
  emulator::current->open.push_back({shared, source, valid});
}

inline void cp_async_commit() {
  emulator::current->groups.push_back(std::move(emulator::current->open));
  emulator::current->open.clear();
}

template <int kPending>
inline void cp_async_wait() {
  auto& groups = emulator::current->groups;
  const size_t num_ended = groups.size() > kPending ? groups.size() - kPending : 0;
  for (size_t i = 0; i < num_ended; i++) {
    for (const auto& copy : groups[i]) emulator::copy_now(copy);
  }
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(num_ended));
}

inline void ldmatrix_x4_of(uint32_t r[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) emulator::fail("ldmatrix from an address that is not aligned to 16");
  const unsigned lane = emulator::lane();
  emulator::meet(0xffffffffu, row, [&](auto of) {
    for (unsigned m = 0; m < 4; m++) {
      uint16_t values[2];
      for (unsigned j = 0; j < 2; j++) {
        const unsigned pair = 2 * (lane % 4) + j, single = lane / 4;
        const unsigned i = transposed ? pair : single, k = transposed ? single : pair;
        std::memcpy(&values[j], static_cast<const char*>(of(8 * m + i)) + 2 * k, 2);
      }
      std::memcpy(&r[m], values, 4);
    }
    return 0;
  });
}

inline void ldmatrix_x4(uint32_t r[4], const void* row) { ldmatrix_x4_of(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t r[4], const void* row) { ldmatrix_x4_of(r, row, true); }

template <typename T>
inline void mma_m16n8k16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    T a[4][2], b[2][2];
  } mine;
  std::memcpy(static_cast<void*>(mine.a), a, 16);
  std::memcpy(static_cast<void*>(mine.b[0]), &b0, 4);
  std::memcpy(static_cast<void*>(mine.b[1]), &b1, 4);
  const unsigned lane = emulator::lane();
  emulator::meet(0xffffffffu, mine, [&](auto of) {
    for (unsigned i = 0; i < 4; i++) {
      const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double sum = 0;
      for (unsigned k = 0; k < 16; k++) {
        const Fragments left = of(row % 8 * 4 + k % 8 / 2), right = of(column * 4 + k % 8 / 2);
        sum += static_cast<double>(static_cast<float>(left.a[k / 8 * 2 + row / 8][k % 2])) *
               static_cast<double>(static_cast<float>(right.b[k / 8][k % 2]));
      }
      d[i] = static_cast<float>(d[i] + sum);
    }
    return 0;
  });
}

}  // namespace faser

#endif  // FASER_CUDA_EMULATOR_H_
