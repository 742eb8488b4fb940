// A thread of low priority that runs tasks of several owners in turn.
#ifndef FASER_TRITON_TASK_THREAD_H_
#define FASER_TRITON_TASK_THREAD_H_

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

namespace faser {

constexpr int kNice = 10;  // gets a tenth of the time of a thread with 0 if both need the core

// Tasks of one owner run in order; owners take turns, one task each, so that a short list does not wait for a long one.
// The thread starts with the first task, and the destructor runs the remaining ones. Tasks do not throw.
class TaskThread {
 public:
  TaskThread() = default;
  ~TaskThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // num_bytes: memory that the task holds until it starts.
  void post(const void* owner, size_t num_bytes, std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tasks& own = tasks_[owner];
    if (own.waiting.empty()) turns_.push_back(owner);
    own.waiting.emplace_back(num_bytes, std::move(task));
    own.num_bytes += num_bytes;
    num_bytes_ += num_bytes;
    if (!thread_.joinable()) thread_ = std::thread(&TaskThread::run, this);
    changed_.notify_all();
  }
  // Returns true if one more task of the owner would make waiting tasks hold more than limit bytes, and the owner's
  // tasks hold at least the mean of all owners.
  bool is_full(const void* owner, size_t num_bytes, size_t limit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tasks_.find(owner);
    const size_t own = found == tasks_.end() ? 0 : found->second.num_bytes;
    return own > 0 && num_bytes_ + num_bytes > limit && own * tasks_.size() >= num_bytes_;
  }

 private:
  using Task = std::pair<size_t, std::function<void()>>;
  struct Tasks {
    std::deque<Task> waiting;
    size_t num_bytes = 0;
  };

  void run() {
#ifdef __linux__  // threads have their own priorities there
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !turns_.empty(); });
      if (turns_.empty()) return;
      const auto found = tasks_.find(turns_.front());
      Tasks& own = found->second;
      auto [num_bytes, task] = std::move(own.waiting.front());
      own.waiting.pop_front();
      own.num_bytes -= num_bytes;
      num_bytes_ -= num_bytes;
      if (own.waiting.empty())
        tasks_.erase(found);
      else
        turns_.push_back(turns_.front());
      turns_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<const void*, Tasks> tasks_;  // of owners that have any
  std::deque<const void*> turns_;                 // the same owners in turn
  size_t num_bytes_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace faser

#endif  // FASER_TRITON_TASK_THREAD_H_
