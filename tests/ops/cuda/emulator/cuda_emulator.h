// CUDA on the CPU for tests: the kernels of plugins/cuda compiled by a host compiler and run as they are.
//
// A block's threads are fibers on one thread of the machine; a fiber runs until it waits for others (a barrier, a
// warp's collective), then the next one runs, in an order that launch() is given, so that a missing barrier shows in
// one of the orders; compiled for ThreadSanitizer it shows in each (races.h). Copies by cp.async happen when they are
// waited for, and until then their destination holds NaNs; shared memory holds a byte of the launch's choice when a
// block begins. Blocks run one after the other, in descending order where a block's threads do. What this cannot show:
// speed, bank conflicts, memory ordering between blocks.
#ifndef FASER_CUDA_EMULATOR_H_
#define FASER_CUDA_EMULATOR_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

// Nothing else is of this kind, so it is a block's shared memory that shared_memory() finds. A section of its own would
// do, but gcc leaves variables of templates out of it without a word.
#undef __shared__
#define __shared__ static thread_local
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

// Runs a kernel whose arguments are pointers and integers, each widened to 64 bits (at most 32 of them).
// Not inline, so that it is there although nothing calls it: a library is one file.
extern "C" void emulator_launch(void* kernel, const unsigned grid[3], const unsigned threads[3],
                                const uint64_t arguments[32], unsigned order) {
  const emulator::Unseen unseen;
  emulator::scheduler.has_run = true;
  emulator::scheduler.fiber = emulator::this_fiber();
  emulator::entry = reinterpret_cast<emulator::Entry>(kernel);
  emulator::arguments = arguments;
  emulator::shared = emulator::shared_memory();
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads[0], threads[1], threads[2]};
  for (unsigned z = 0; z < grid[2]; z++) {
    for (unsigned y = 0; y < grid[1]; y++) {
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {order == 1 ? grid[0] - 1 - x : x, y, z};
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

// What a block finds in shared memory, from the next launch on.
extern "C" void emulator_fill_shared(int byte) { emulator::shared_byte = byte; }

// Leaves out the barrier in this line of the file from now on; how often one was left out since the last call.
extern "C" uint64_t emulator_leave_out(const char* file, int line) {
  const uint64_t num_passed = emulator::left_out.num_passed;
  emulator::left_out = {file, line};
  return num_passed;
}

// Barriers know their place by the defaults of their arguments.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (!emulator::is_left_out(file, line)) emulator::barrier(0);
}
inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::is_left_out(file, line) ? predicate != 0 : emulator::barrier(predicate != 0);
}

inline void __syncwarp(unsigned mask = emulator::kAllLanes, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  if (!emulator::is_left_out(file, line)) emulator::warp_barrier(mask);
}

// Orders memory for other blocks, which here come one after the other.
inline void __threadfence() {}

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
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <typename T>
T atomicMin(T* address, T value) {
  T seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
inline float __fmul_rn(float a, float b) { return a * b; }
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
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));
  return y < 0x1p-126f ? 0.0f : y;
}

inline void prefetch_line(const void*) {}

inline float log2_approx(float x) { return static_cast<float>(std::log2(static_cast<double>(x))); }

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
inline void cp_async_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (emulator::is_left_out(file, line)) return;
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
  const char* sources[4][2];
  emulator::meet(0xffffffffu, row, [&](auto of) {
    for (unsigned m = 0; m < 4; m++) {
      for (unsigned j = 0; j < 2; j++) {
        const unsigned pair = 2 * (lane % 4) + j, single = lane / 4;
        const unsigned i = transposed ? pair : single, k = transposed ? single : pair;
        sources[m][j] = static_cast<const char*>(of(8 * m + i)) + 2 * k;
      }
    }
    return 0;
  });
  for (unsigned m = 0; m < 4; m++) {
    uint16_t values[2];
    for (unsigned j = 0; j < 2; j++) std::memcpy(&values[j], sources[m][j], 2);
    std::memcpy(&r[m], values, 4);
  }
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
      Fragments left[4], right[4];
      for (unsigned pair = 0; pair < 4; pair++) {
        left[pair] = of(row % 8 * 4 + pair);
        right[pair] = of(column * 4 + pair);
      }
      double sum = 0;
      for (unsigned k = 0; k < 16; k++) {
        sum += static_cast<double>(static_cast<float>(left[k % 8 / 2].a[k / 8 * 2 + row / 8][k % 2])) *
               static_cast<double>(static_cast<float>(right[k % 8 / 2].b[k / 8][k % 2]));
      }
      d[i] = static_cast<float>(d[i] + sum);
    }
    return 0;
  });
}

}  // namespace faser

#endif  // FASER_CUDA_EMULATOR_H_
