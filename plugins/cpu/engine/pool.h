// The threads of one CPU partition. Workers spin for a bounded time, then sleep; the caller is worker 0.
#ifndef FASER_POOL_H_
#define FASER_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "faser_cpu.h"

namespace faser {

// Yields to the sibling hardware thread while waiting.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins briefly, then yields the core at each call, since a waiter must not starve the thread that it waits for.
class Backoff {
 public:
  void wait() {
    if (++num_waits_ < kNumSpins)
      cpu_pause();
    else
      std::this_thread::yield();
  }

 private:
  static constexpr int kNumSpins = 64;
  int num_waits_ = 0;
};

// Barrier of a team: the phase counter serves as the sense, so no per-thread state is needed.
class alignas(64) Barrier {
 public:
  void arrive_and_wait(int team_size) {
    if (team_size == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_size) {
      num_arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    Backoff backoff;
    while (phase_.load(std::memory_order_acquire) == phase) backoff.wait();
  }

 private:
  std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Hands out loop indices to idle workers. The caller resets it while it is unused.
class alignas(64) Counter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int> next_{0};
};

// One worker's view of a team working on one job together.
struct Team {
  int id;
  int size;
  Barrier* barrier;

  void sync() const { barrier->arrive_and_wait(size); }
  // This worker's share of [0, count), contiguous; shares differ by at most one.
  int begin(int count) const { return static_cast<int>(static_cast<int64_t>(count) * id / size); }
  int end(int count) const { return static_cast<int>(static_cast<int64_t>(count) * (id + 1) / size); }
};

}  // namespace faser

// One caller at a time.
struct faser_pool {
 public:
  // Throws std::system_error if a thread cannot be started.
  faser_pool(const int32_t* cores, int num_threads, int spin_us);
  ~faser_pool();
  faser_pool(const faser_pool&) = delete;
  faser_pool& operator=(const faser_pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs body(const faser::Team&) on `size` workers (at most num_threads) and waits for all of them.
  template <typename Body>
  void run_team(int size, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    fork_join(
        size, [](void* argument, const faser::Team& team) { (*static_cast<Plain*>(argument))(team); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Runs body(i) for i in [0, count), handed out one at a time.
  template <typename Body>
  void parallel_for(int count, Body&& body) {
    if (count <= 0) return;
    faser::Counter counter;
    run_team(count < num_threads_ ? count : num_threads_, [&](const faser::Team&) {
      for (int i = counter.next(); i < count; i = counter.next()) body(i);
    });
  }

 private:
  using Job = void (*)(void* argument, const faser::Team& team);

  void fork_join(int size, Job job, void* argument);
  void work(int id, int core);

  const int num_threads_;
  const int spin_us_;
  // Low 16 bits: team size of the current job (0: shut down); above them the job's number.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Job job_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<int> num_running_{0};
  std::atomic<int> num_sleeping_{0};
  faser::Barrier barrier_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

#endif  // FASER_POOL_H_
