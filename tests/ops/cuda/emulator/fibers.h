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
constexpr unsigned kAllLanes = 0xffffffffu;
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

// Meetings of one warp, or one lane's count of those that it has joined, by their mask; nearly all are of all lanes.
template <typename T>
struct ByMask {
  T of_all{};
  std::map<unsigned, T> of_some;

  T& operator[](unsigned mask) { return mask == kAllLanes ? of_all : of_some[mask]; }
};

// A thread of a block. A number that it waits for is looked at before it gets a turn, which would only pass it on.
struct Fiber {
  EmulatedIndex index;
  bool done = false;
  const uint64_t* waits_for = nullptr;
  uint64_t until = 0;
  ByMask<uint64_t> meetings_joined;
  uint64_t warp_barriers = 0;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;

  bool can_go_on() const { return !done && (waits_for == nullptr || *waits_for >= until); }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<ByMask<Meeting>> meetings;
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
inline Stack* current_stack;
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

// Until another fiber has made the number at least so large.
inline void wait_until(const uint64_t& number, uint64_t least) {
  if (number >= least) return;
  current->waits_for = &number;
  current->until = least;
  go_on(*current_stack, scheduler);
  current->waits_for = nullptr;
}

inline void release_barrier() {
  block->waiting_at_barrier = 0;
  block->barrier_generation++;
  block->barrier_result = block->barrier_any;
  block->barrier_any = 0;
  block->progress++;
}

inline void end_thread() {
  const Unseen unseen;
  current->done = true;
  block->num_done++;
  block->progress++;
  const unsigned live = static_cast<unsigned>(block->fibers.size()) - block->num_done;
  if (live > 0 && block->waiting_at_barrier == live) release_barrier();
}

// A stack's outermost call, which does not return: a turn for each block that has such a thread, since a new context
// would take system calls, and to ThreadSanitizer it would be one more call.
FASER_UNSANITIZED inline void run_threads() {
  for (;;) {
    const uint64_t* a = arguments;
    acquire(&block_begin);
    entry(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
          a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
    release(&block_end);
    end_thread();
    go_on(*current_stack, scheduler);
  }
}

inline void resume(Fiber& fiber, Stack& stack) {
  current = &fiber;
  current_stack = &stack;
  threadIdx = fiber.index;
  go_on(scheduler, stack);
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
  wait_until(meeting.arrived, (round + 1) * members);
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
    wait_until(block->barrier_generation, generation + 1);
  }
  acquire(order);
  return block->barrier_result;
}

// Barrier of all lanes of a warp. It has two places: a lane may reach the next barrier before others leave this one.
inline char warp_barrier_order[1024 / kLanes][2];

inline void warp_barrier(unsigned mask) {
  const Unseen unseen;
  if (mask != kAllLanes) fail("a barrier of some lanes of a warp");
  char* order = &warp_barrier_order[linear_thread() / kLanes][current->warp_barriers++ % 2];
  release(order);
  meet(mask, 0, [](auto) { return 0; });
  acquire(order);
}

inline void copy_now(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(copy.target, copy.source, 16);
  } else {
    std::memset(copy.target, 0, 16);
  }
}

// One stack per thread of the largest block so far.
inline Stack& stack_of(size_t thread) {
  static std::vector<std::unique_ptr<char[]>> memory;
  static std::vector<std::unique_ptr<Stack>> stacks;
  while (stacks.size() <= thread) {
    memory.emplace_back(new char[kStackBytes]);
    stacks.emplace_back(new Stack);
    Stack& stack = *stacks.back();
    stack.fiber = new_fiber();
    getcontext(&stack.context);
    stack.context.uc_stack.ss_sp = memory.back().get();
    stack.context.uc_stack.ss_size = kStackBytes;
    stack.context.uc_link = nullptr;
    makecontext(&stack.context, run_threads, 0);
  }
  return *stacks[thread];
}

// order 0: threads ascending; 1: descending; else a permutation that changes every round.
inline void run_block(unsigned order) {
  const size_t num_threads = size_t{blockDim.x} * blockDim.y * blockDim.z;
  stack_of(num_threads - 1);
  std::memset(shared.begin, shared_byte, shared.size);
  Block state;
  block = &state;
  state.fibers.resize(num_threads);
  state.meetings.resize((num_threads + kLanes - 1) / kLanes);
  std::vector<size_t> turn(num_threads);
  for (size_t i = 0; i < num_threads; i++) {
    state.fibers[i].index = {static_cast<unsigned>(i % blockDim.x), static_cast<unsigned>(i / blockDim.x % blockDim.y),
                             static_cast<unsigned>(i / blockDim.x / blockDim.y)};
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
      if (state.fibers[i].can_go_on()) resume(state.fibers[i], stack_of(i));
    }
    if (state.progress == before && state.num_done < num_threads) fail("threads wait for each other (a deadlock)");
  }
  acquire(&block_end);
}

}  // namespace emulator

#endif  // FASER_CUDA_EMULATOR_FIBERS_H_
