#include "engine.h"

#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <utility>

#include "log.h"

namespace faser {
namespace {

constexpr double kPingPeriodS = 1.0;
constexpr double kStartCheckPeriodS = 0.25;
constexpr double kSlowSteps = 4.0;  // a step counts as hung only after this multiple of a slow step's time
constexpr double kSteadyS = 10.0;   // a process that ran this long resets the back-off
constexpr char kStopped[] = "the engine process stopped while it served the request; send the request again";
constexpr char kShuttingDown[] = "the server is shutting down; send the request to another one";

using Seconds = std::chrono::duration<double>;

double seconds_since(std::chrono::steady_clock::time_point then) {
  return Seconds(std::chrono::steady_clock::now() - then).count();
}

std::chrono::steady_clock::duration ticks(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(Seconds(seconds));
}

std::string shown(double number, const char* format) {
  char text[64];
  std::snprintf(text, sizeof(text), format, number);
  return text;
}

// glibc keeps freed memory of each heap, and the server has a heap for most of its threads.
void return_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

Engine::Engine() : retry_at_(Clock::now()) {}

Engine::~Engine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    channel_.wake();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

Opened Engine::open(const ModelInfo& info, uint32_t* model) {
  std::unique_lock<std::mutex> lock(mutex_);
  *model = next_model_++;
  models_[*model].info = info;
  if (!thread_.joinable())
    thread_ = std::thread(&Engine::run, this);
  else if (channel_.is_open() && channel_.send(open_frame(*model, info)) == Sent::kTooMuchWaits) {
    models_.erase(*model);
    return {OpenStatus::kFailed,
            {TRITONSERVER_ERROR_UNAVAILABLE, "the engine process does not take requests; load the model again later"}};
  }
  // A draining process opens no more models, and no process follows it.
  const auto is_decided = [&] {
    return models_[*model].has_answer || state_ == State::kClosed || state_ == State::kDraining;
  };
  // The first process may take as long as it needs; later ones might crash again and again.
  changed_.wait(lock, [&] { return is_decided() || num_starts_ > 1; });
  changed_.wait_for(lock, ticks(settings_.startup_timeout_s), is_decided);
  const Model found = models_[*model];
  if (found.has_answer && found.answer.status == OpenStatus::kOpened) return found.answer;
  forget(*model);
  return found.has_answer ? found.answer : Opened{OpenStatus::kFailed, unavailable()};
}

void Engine::close(uint32_t model) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget(model);
}

void Engine::forget(uint32_t model) {
  models_.erase(model);
  FrameWriter frame(ToEngine::kClose);
  frame.put(model);
  channel_.send(frame.frame());
}

bool Engine::has_models() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !models_.empty();
}

bool Engine::is_ready() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return accepts();
}

void Engine::submit(uint32_t model, TRITONBACKEND_Request* request) {
  TRITONBACKEND_ResponseFactory* factory;
  if (!succeeded(TRITONBACKEND_ResponseFactoryNew(&factory, request), "response factory")) {
    refuse_without_factory(request);
    return;
  }
  const Parameters parameters = read_parameters(request);
  const auto open = std::make_shared<OpenRequest>(model, factory, parameters.wants_error_code);
  const uint64_t handle = next_handle_++;
  std::string frame;
  Refusal refusal{TRITONSERVER_ERROR_INVALID_ARG, ""};
  try {
    frame = request_frame(model, handle, request, parameters);
  } catch (const std::bad_alloc&) {
    refusal = {TRITONSERVER_ERROR_UNAVAILABLE, "the server has no memory left for the request; try again later"};
  } catch (const std::runtime_error& error) {
    refusal.message = error.what();
  }
  ModelInfo info;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_served_ = true;
    if (refusal.message.empty()) {
      const Sent sent = accepts() ? channel_.send(frame) : Sent::kNobodyReads;
      if (sent == Sent::kYes) {
        if (requests_.empty()) channel_.wake();  // from now on, the thread polls for cancellation
        requests_.emplace(handle, open);
        return;
      }
      if (!accepts())
        refusal = unavailable();
      else if (sent == Sent::kTooMuchWaits)
        refusal = {TRITONSERVER_ERROR_UNAVAILABLE, "the engine process does not take requests; try again later"};
      else
        refusal = {TRITONSERVER_ERROR_UNAVAILABLE, kStopped};  // the thread has not noticed its end yet
    }
    const auto found = models_.find(model);
    if (found != models_.end()) info = found->second.info;
  }
  open->fail(refusal);
  Metrics::count_failure(info.name, info.version,
                         refusal.code == TRITONSERVER_ERROR_UNAVAILABLE ? "UNAVAILABLE" : "INVALID_ARG");
}

bool Engine::accepts() const { return state_ == State::kReady && hung_s() < health_timeout_s(); }

double Engine::hung_s() const { return silent_s_ + stalled_s_; }

double Engine::health_timeout_s() const {
  return std::max(settings_.health_timeout_s, std::min(kSlowSteps * slow_step_s_, settings_.hang_timeout_s));
}

Refusal Engine::unavailable() const {
  const auto say = [](std::string message) { return Refusal{TRITONSERVER_ERROR_UNAVAILABLE, std::move(message)}; };
  if (state_ == State::kDraining || state_ == State::kClosed) return say(kShuttingDown);
  if (state_ == State::kReady) {
    const std::string time = shown(hung_s(), "%.0f");
    if (stalled_s_ >= kPingPeriodS) return say("the engine has been in one step for " + time + " s; try again later");
    return say("the engine process has not answered for " + time + " s; try again later");
  }
  const double left_s = Seconds(retry_at_ - Clock::now()).count();
  const long retry_s = std::max(1L, std::lround(left_s) + 1);
  return say("the engine process is starting again after a crash; try again in " + std::to_string(retry_s) + " s");
}

std::string Engine::open_frame(uint32_t model, const ModelInfo& info) const {
  FrameWriter frame(ToEngine::kOpen);
  frame.put(model);
  for (const std::string* text : {&info.name, &info.version, &info.repository, &info.config_json})
    frame.put_text(*text);
  return frame.frame();
}

// The engine's own thread. When it ends, for whatever reason, the kernel kills the engine process.
void Engine::run() {
  for (;;) {
    const Clock::time_point started = Clock::now();
    try {
      serve_process();
    } catch (const std::exception& error) {
      log_error(std::string("the engine process is ended: ") + error.what());
    }
    end_process();
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_ || state_ != State::kDown) break;
    if (seconds_since(started) > kSteadyS || backoff_s_ == 0) backoff_s_ = settings_.restart_backoff_s;
    changed_.wait_for(lock, ticks(backoff_s_), [this] { return closing_.load(); });
    if (closing_) break;
    backoff_s_ = std::min(2 * backoff_s_, settings_.restart_backoff_max_s);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::kDraining) state_ = State::kClosed;
  changed_.notify_all();
}

void Engine::serve_process() {
  const Clock::time_point started = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pid_ = channel_.start();
    if (pid_ < 0) return;
    FrameWriter hello(ToEngine::kHello);
    hello.put(kWireVersion);
    hello.put(num_starts_++);
    hello.put_text(kRelease);
    changed_.notify_all();
    channel_.send(hello.frame());
    for (const auto& [id, model] : models_) channel_.send(open_frame(id, model.info));
  }
  Clock::time_point next_ping = started, next_check = started, last_pass = started;
  while (!closing_) {
    const Clock::time_point now = Clock::now();
    bool wants_room = false, trims = false;
    int timeout_ms = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // A pause of this process or machine does not count as silence: each pass of the loop counts for a ping's period
      // at most.
      if (awaits_pong_) silent_s_ += std::min(Seconds(now - last_pass).count(), kPingPeriodS);
      last_pass = now;
      if (is_stuck(started)) return;
      if (state_ == State::kReady && now >= next_ping) {
        awaits_pong_ |= channel_.send(FrameWriter(ToEngine::kPing).frame()) == Sent::kYes;
        metrics_.set_ready(accepts());
        next_ping = now + ticks(kPingPeriodS);
        trims = requests_.empty() && has_served_;
        has_served_ &= !trims;
      }
      if (now >= next_check) {
        check_cancelled();
        next_check = now + ticks(settings_.cancellation_check_period_s);
      }
      wants_room = channel_.flush();
      Clock::time_point next = state_ == State::kReady ? next_ping : now + ticks(kStartCheckPeriodS);
      if (!requests_.empty()) next = std::min(next, next_check);
      timeout_ms = std::max(1, static_cast<int>(std::ceil(1e3 * Seconds(next - now).count())));
    }
    if (trims) return_free_memory();
    channel_.wait(timeout_ms, wants_room);
    if (!channel_.receive([this](const char* begin, const char* end) { handle(begin, end); })) return;
  }
}

bool Engine::is_stuck(Clock::time_point started) {
  if (state_ == State::kReady && hung_s() >= settings_.hang_timeout_s) {
    log_error("the engine process has hung for " + shown(hung_s(), "%.0f") + " s and is restarted");
    return true;
  }
  if ((state_ == State::kDown || state_ == State::kStarting) && seconds_since(started) >= settings_.startup_timeout_s) {
    const std::string limit = shown(settings_.startup_timeout_s, "%g");
    log_error("the engine process was not ready within " + limit + " s and is restarted");
    for (auto& [id, model] : models_)
      if (!model.has_answer && state_ == State::kStarting) {
        model.has_answer = true;
        model.answer = {OpenStatus::kFailed,
                        {TRITONSERVER_ERROR_UNAVAILABLE,
                         "the engine was not ready within startup_timeout_s " + limit + "; raise it"}};
      }
    return true;
  }
  return false;
}

void Engine::check_cancelled() {
  for (auto& [handle, request] : requests_)
    if (request->was_cancelled() && cancel(handle)) request->note_cancelled();
}

bool Engine::cancel(uint64_t handle) {
  FrameWriter frame(ToEngine::kCancel);
  frame.put(handle);
  return channel_.send(frame.frame()) == Sent::kYes;
}

void Engine::fail(const std::shared_ptr<OpenRequest>& request, const Refusal& refusal) {
  if (request->is_large)
    large_responses_.post(request.get(), 0, [request, refusal] { request->fail(refusal); });
  else
    request->fail(refusal);
}

void Engine::end_process() {
  std::unordered_map<uint64_t, std::shared_ptr<OpenRequest>> left;
  std::map<uint32_t, Model> models;
  Refusal refusal{TRITONSERVER_ERROR_UNAVAILABLE, kStopped};
  bool drains;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left.swap(requests_);
    models = models_;
    drains = state_ == State::kDraining;
    if (drains || closing_) refusal.message = kShuttingDown;
    if (state_ == State::kStarting) {
      state_ = State::kClosed;
      for (auto& [id, model] : models_)
        if (!model.has_answer) {
          model.has_answer = true;
          model.answer = {
              OpenStatus::kFailed,
              {TRITONSERVER_ERROR_UNAVAILABLE, "the engine process ended before it was ready; see the server's log"}};
        }
    } else if (!drains) {
      state_ = State::kDown;
    }
    retry_at_ = Clock::now() + ticks(settings_.restart_backoff_s);
    channel_.close();
    changed_.notify_all();
  }
  for (auto& [handle, request] : left) {
    if (request->is_dropped) continue;
    const ModelInfo& info = models[request->model()].info;
    fail(request, refusal);
    Metrics::count_failure(info.name, info.version, "UNAVAILABLE");
  }
  metrics_.rest();
  if (pid_ < 0) return;
  int status = 0;
  bool ended = false;
  for (int i = 0; drains && i < 100 && !ended; ++i) {
    ended = waitpid(pid_, &status, WNOHANG) == pid_;
    const timespec pause{0, 10'000'000};
    if (!ended) nanosleep(&pause, nullptr);
  }
  if (!ended) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
  }
  pid_ = -1;
  if (!drains && !closing_)
    log_error("the engine process ended with status " +
              std::to_string(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status)));
}

}  // namespace faser
