#include "pool.h"

#include <chrono>
#include <exception>
#include <memory>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace {

constexpr int kTeamBits = 16;
constexpr uint64_t kTeamMask = (1u << kTeamBits) - 1;

// Best effort: the thread stays unpinned if the core is not available.
void pin_to_core(int core) {
#ifdef __linux__
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
  (void)core;
#endif
}

}  // namespace

faser_pool::faser_pool(const int32_t* cores, int num_threads, int spin_us)
    : num_threads_(num_threads), spin_us_(spin_us) {
  threads_.reserve(num_threads - 1);
  try {
    for (int id = 1; id < num_threads; id++)
      threads_.emplace_back(&faser_pool::work, this, id, cores != nullptr ? cores[id] : -1);
  } catch (...) {
    // A throwing constructor runs no destructor, and destroying a joinable std::thread terminates the process.
    fork_join(0, nullptr, nullptr);
    for (std::thread& thread : threads_) thread.join();
    throw;
  }
}

faser_pool::~faser_pool() {
  fork_join(0, nullptr, nullptr);
  for (std::thread& thread : threads_) thread.join();
}

void faser_pool::fork_join(int size, Job job, void* argument) {
  if (size == 1) {
    job(argument, faser::Team{0, 1, &barrier_});
    return;
  }
  job_ = job;
  argument_ = argument;
  num_running_.store(size - 1, std::memory_order_relaxed);
  const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> kTeamBits) + 1;
  // Sequentially consistent with the sleeper's increment: either the sleeper sees the ticket or this sees it sleeping.
  ticket_.store(number << kTeamBits | static_cast<uint64_t>(size));
  if (num_sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  if (size == 0) return;
  job(argument, faser::Team{0, size, &barrier_});
  faser::Backoff backoff;
  while (num_running_.load(std::memory_order_acquire) > 0) backoff.wait();
}

void faser_pool::work(int id, int core) {
  pin_to_core(core);
  uint64_t seen = 0;
  while (true) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (ticket == seen) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
      do {
        for (int i = 0; i < 16 && ticket == seen; i++) {
          faser::cpu_pause();
          ticket = ticket_.load(std::memory_order_acquire);
        }
      } while (ticket == seen && std::chrono::steady_clock::now() < deadline);
    }
    if (ticket == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return ticket_.load() != seen; });
      num_sleeping_.fetch_sub(1);
      ticket = ticket_.load();
    }
    seen = ticket;
    const int size = static_cast<int>(ticket & kTeamMask);
    if (size == 0) return;
    // A job that includes this worker waits for it, so job_ cannot change under it.
    if (id >= size) continue;
    job_(argument_, faser::Team{id, size, &barrier_});
    num_running_.fetch_sub(1, std::memory_order_release);
  }
}

extern "C" {

faser_pool* faser_pool_create(const int32_t* cores, int32_t num_threads, int32_t spin_us) {
  if (num_threads < 1 || num_threads > 1024 || spin_us < 0) return nullptr;
  try {
    return new faser_pool(cores, num_threads, spin_us);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void faser_pool_destroy(faser_pool* pool) { delete pool; }
}
