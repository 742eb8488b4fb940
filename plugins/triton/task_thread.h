// A thread that runs tasks in their order.
#ifndef FASER_TRITON_TASK_THREAD_H_
#define FASER_TRITON_TASK_THREAD_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace faser {

// Starts with the first task. The destructor runs what is left. Tasks do not throw.
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

  // num_bytes: memory that the task holds until it has run.
  void post(size_t num_bytes, std::function<void()> task) {
    num_bytes_ += num_bytes;
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace_back(num_bytes, std::move(task));
    if (!thread_.joinable()) thread_ = std::thread(&TaskThread::run, this);
    changed_.notify_all();
  }
  // Memory of the tasks that have yet to end.
  size_t num_bytes() const { return num_bytes_; }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto [num_bytes, task] = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      num_bytes_ -= num_bytes;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<size_t, std::function<void()>>> tasks_;
  std::atomic<size_t> num_bytes_{0};
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace faser

#endif  // FASER_TRITON_TASK_THREAD_H_
