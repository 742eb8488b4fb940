// Starts, watches and restarts an engine process, and passes on the requests of all models that share it.
#ifndef FASER_TRITON_ENGINE_H_
#define FASER_TRITON_ENGINE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "channel.h"
#include "metrics.h"
#include "pace.h"
#include "requests.h"
#include "task_thread.h"
#include "triton_api.h"
#include "wire.h"

namespace faser {

// A model as Triton describes it; the engine process reads its configuration.
struct ModelInfo {
  std::string name, version, repository, config_json;
};

struct Opened {
  OpenStatus status;
  Refusal error;
};

// All threads of Triton may call it. Its own thread reads the engine process's frames, answers requests, polls for
// cancellation, and restarts the process after a crash. Triton turns a response into JSON on the thread that sends it,
// so another thread sends large responses, and pings and other requests do not wait for them.
class Engine {
 public:
  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Waits until the engine process serves the model, refuses it, or reports another configuration.
  Opened open(const ModelInfo& info, uint32_t* model);
  void close(uint32_t model);
  bool has_models();
  // Takes a request of a model; always answers it.
  void submit(uint32_t model, TRITONBACKEND_Request* request);
  bool is_ready();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kStarting, kReady, kDown, kDraining, kClosed };
  struct Model {
    ModelInfo info;
    bool has_answer = false;
    Opened answer{};
  };
  // Times that the engine process reads from its configuration; until then, only the first is used.
  struct Settings {
    double startup_timeout_s = 600, health_timeout_s = 10, hang_timeout_s = 60;
    double restart_backoff_s = 0.5, restart_backoff_max_s = 30, cancellation_check_period_s = 0.1;
  };

  void forget(uint32_t model);
  void run();
  void serve_process();
  void end_process();
  void handle(const char* begin, const char* end);
  void answer(FrameReader& body);
  void fail(const std::shared_ptr<OpenRequest>& request, const Refusal& refusal);
  void check_cancelled();
  bool cancel(uint64_t handle);
  bool is_stuck(Clock::time_point started);
  double hung_s() const;
  double health_timeout_s() const;
  bool accepts() const;
  Refusal unavailable() const;
  std::string open_frame(uint32_t model, const ModelInfo& info) const;

  std::mutex mutex_;  // guards everything but members that only the engine's own thread uses
  std::condition_variable changed_;
  State state_ = State::kStarting;
  Channel channel_;
  std::map<uint32_t, Model> models_;
  std::unordered_map<uint64_t, std::shared_ptr<OpenRequest>> requests_;  // only its own thread removes them
  Settings settings_;
  double backoff_s_ = 0;
  Clock::time_point retry_at_;
  // How long a ping has waited for its answer, and how long the executor had not made progress at the last answer.
  double silent_s_ = 0, stalled_s_ = 0;
  bool awaits_pong_ = false;
  bool has_served_ = false;  // requests, since free memory was last returned to the system
  double slow_step_s_ = 0;
  std::atomic<bool> closing_{false};
  std::atomic<uint64_t> next_handle_{1};
  uint32_t next_model_ = 0;
  uint32_t num_starts_ = 0;
  Metrics metrics_;  // only its own thread uses it
  TaskThread large_responses_;
  Pace pace_;  // of the reading thread
  int pid_ = -1;
  std::thread thread_;
};

}  // namespace faser

#endif  // FASER_TRITON_ENGINE_H_
