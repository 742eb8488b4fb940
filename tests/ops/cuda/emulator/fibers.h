// A block of CUDA on one thread of the machine: fibers that take turns, barriers, what a warp's lanes give each other,
// shared memory. The names that kernels know of it are in cuda_emulator.h.
#ifndef FASER_CUDA_EMULATOR_FIBERS_H_
#define FASER_CUDA_EMULATOR_FIBERS_H_

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "races.h"

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
  uint64_t arrived = 0;
};

// Where the machine's thread goes on, on one of several stacks.
struct Stack {
  ucontext_t context;
  jmp_buf place;
  bool has_run = false;
  void* fiber = nullptr;  // ThreadSanitizer's name of it
};

struct Fiber {
  Stack stack;
  EmulatedIndex index;
  bool done = false;
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
inline Stack scheduler;
inline char barrier_order[2], block_begin, block_end;
inline Entry entry;
inline const uint64_t* arguments;
inline int shared_byte = 0xff;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s in block (%u, %u, %u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z);
  std::abort();
}

struct SharedMemory {
  char* begin;
  size_t size;
};
inline SharedMemory shared;

// Of this library and thread: all that is thread_local.
inline SharedMemory shared_memory() {
  static thread_local char inside;
  SharedMemory found{&inside, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* result) {
        auto* memory = static_cast<SharedMemory*>(result);
        for (int i = 0; i < library->dlpi_phnum; i++) {
          char* begin = static_cast<char*>(library->dlpi_tls_data);
          const size_t size = library->dlpi_phdr[i].p_memsz;
          if (library->dlpi_phdr[i].p_type != PT_TLS || begin == nullptr) continue;
          if (memory->begin < begin || memory->begin >= begin + size) continue;
          *memory = {begin, size};
          return 1;
        }
        return 0;
      },
      &found);
  if (found.size == 0) fail("shared memory was not found");
  return found;
}

// A barrier or wait that tests have taken out of the kernels, by its file's path behind plugins/cuda and its line.
struct LeftOut {
  std::string file;
  int line = 0;
  uint64_t num_passed = 0;

  bool is_at(const char* path, int at) {
    if (at != line) return false;
    const std::string whole = path;
    if (whole.size() < file.size() || whole.compare(whole.size() - file.size(), file.size(), file) != 0) return false;
    num_passed++;
    return true;
  }
};
inline LeftOut left_out;

inline bool is_left_out(const char* path, int line) {
  const Unseen unseen;
  return left_out.is_at(path, line);
}

// ThreadSanitizer cannot follow a jump to another stack; swapcontext, which it can, makes system calls.
FASER_UNSANITIZED inline void go_on(Stack& from, Stack& to) {
  switch_to(to.fiber);
#ifdef __SANITIZE_THREAD__
  swapcontext(&from.context, &to.context);
#else
  if (_setjmp(from.place) != 0) return;
  if (to.has_run) _longjmp(to.place, 1);
  to.has_run = true;
  setcontext(&to.context);
#endif
}

inline void yield() { go_on(current->stack, scheduler); }

inline void release_barrier() {
  block->waiting_at_barrier = 0;
  block->barrier_generation++;
  block->barrier_result = block->barrier_any;
  block->barrier_any = 0;
  block->progress++;
}

// A fiber's outermost call, which does not return: to ThreadSanitizer it would be one more in each block.
FASER_UNSANITIZED inline void run_fiber() {
  const uint64_t* a = arguments;
  acquire(&block_begin);
  entry(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
  release(&block_end);
  current->done = true;
  block->num_done++;
  block->progress++;
  const unsigned live = static_cast<unsigned>(block->fibers.size()) - block->num_done;
  {
    const Unseen unseen;
    if (live > 0 && block->waiting_at_barrier == live) release_barrier();
  }
  go_on(current->stack, scheduler);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  go_on(scheduler, fiber.stack);
}

inline unsigned linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

inline unsigned lane() { return linear_thread() % kLanes; }

// Every lane of the mask gives a value; the function then gets all of them, by lane. It orders no memory accesses.
template <typename In, typename Function>
auto meet(unsigned mask, const In& in, Function function) {
  static_assert(sizeof(In) <= kDepositBytes);
  const Unseen unseen;
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
  const Unseen unseen;
  const uint64_t generation = block->barrier_generation;
  char* order = &barrier_order[generation % 2];
  release(order);
  block->barrier_any |= predicate;
  block->progress++;
  if (++block->waiting_at_barrier == block->fibers.size() - block->num_done) {
    release_barrier();
  } else {
    while (block->barrier_generation == generation) yield();
  }
  acquire(order);
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
  static std::vector<void*> names;
  while (stacks.size() < num_threads) {
    stacks.emplace_back(new char[kStackBytes]);
    names.push_back(new_fiber());
  }
  std::memset(shared.begin, shared_byte, shared.size);
  Block state;
  block = &state;
  state.fibers.resize(num_threads);
  std::vector<size_t> turn(num_threads);
  for (size_t i = 0; i < num_threads; i++) {
    Fiber& fiber = state.fibers[i];
    fiber.index = {static_cast<unsigned>(i % blockDim.x), static_cast<unsigned>(i / blockDim.x % blockDim.y),
                   static_cast<unsigned>(i / blockDim.x / blockDim.y)};
    fiber.stack.fiber = names[i];
    getcontext(&fiber.stack.context);
    fiber.stack.context.uc_stack.ss_sp = stacks[i].get();
    fiber.stack.context.uc_stack.ss_size = kStackBytes;
    fiber.stack.context.uc_link = nullptr;
    makecontext(&fiber.stack.context, run_fiber, 0);
    turn[i] = order == 1 ? num_threads - 1 - i : i;
  }
  uint64_t seed = order;
  release(&block_begin);
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
  acquire(&block_end);
}

}  // namespace emulator

#endif  // FASER_CUDA_EMULATOR_FIBERS_H_
