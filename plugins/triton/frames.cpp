// Frames from the engine process: settings, models, responses, metrics and pongs.
#include <stdexcept>
#include <string>
#include <utility>

#include "engine.h"
#include "log.h"

namespace faser {
namespace {

constexpr double kMaxTimeS = 1e9;  // above what faser.yaml allows, and cannot overflow the clock
constexpr char kNotSent[] =
    "the output is made faster than the server can send it; ask for less of it, or send the request again later";

// Reads a time in seconds. Throws std::runtime_error if it is out of range.
double take_time(FrameReader& body) {
  const double time_s = body.take<double>();
  if (!(time_s >= 0 && time_s <= kMaxTimeS)) throw std::runtime_error("it sent a time that none can be");
  return time_s;
}

}  // namespace

void Engine::handle(const char* begin, const char* end) {
  FrameReader body(begin, end);
  const auto type = static_cast<FromEngine>(body.take<uint8_t>());
  if (type == FromEngine::kResponses) {
    int num_responses = 0;
    pace_.begin();
    for (; !body.is_done(); num_responses++) answer(body);
    pace_.end(num_responses);
    return;
  }
  if (type == FromEngine::kMetrics) {
    metrics_.apply(body);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (type == FromEngine::kHello) {
    const uint32_t version = body.take<uint32_t>();
    if (version != kWireVersion)
      throw std::runtime_error("it speaks version " + std::to_string(version) + " of the protocol, this backend " +
                               std::to_string(kWireVersion) + "; install both from the same release");
    for (double* setting :
         {&settings_.startup_timeout_s, &settings_.health_timeout_s, &settings_.hang_timeout_s,
          &settings_.restart_backoff_s, &settings_.restart_backoff_max_s, &settings_.cancellation_check_period_s})
      *setting = take_time(body);
  } else if (type == FromEngine::kOpened) {
    const auto found = models_.find(body.take<uint32_t>());
    Opened opened{static_cast<OpenStatus>(body.take<uint8_t>()), {}};
    opened.error.code = static_cast<TRITONSERVER_Error_Code>(body.take<uint8_t>());
    opened.error.message = body.take_text();
    if (opened.status == OpenStatus::kOpened && state_ != State::kReady && state_ != State::kDraining) {
      state_ = State::kReady;
      silent_s_ = stalled_s_ = 0;
      awaits_pong_ = false;
    }
    if (opened.status == OpenStatus::kFailed) log_error("a model cannot be opened: " + opened.error.message);
    if (found != models_.end()) {
      found->second.has_answer = true;
      found->second.answer = std::move(opened);
    }
    changed_.notify_all();
  } else if (type == FromEngine::kPong) {
    stalled_s_ = take_time(body);
    slow_step_s_ = take_time(body);
    silent_s_ = 0;
    awaits_pong_ = false;
  } else if (type == FromEngine::kDraining) {
    state_ = State::kDraining;
    changed_.notify_all();
  } else {
    throw std::runtime_error("it sent a frame of unknown type");
  }
}

void Engine::answer(FrameReader& body) {
  const uint64_t handle = body.take<uint64_t>();
  FrameReader response = body;
  const char* const begin = body.position();
  const bool is_final = skip_response(body);
  const size_t num_bytes = static_cast<size_t>(body.position() - begin);
  std::shared_ptr<OpenRequest> request;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(handle);
    if (found == requests_.end()) throw std::runtime_error("it answered a request that is not open");
    request = found->second;
    if (is_final) requests_.erase(found);  // ends polling for its cancellation
    if (request->is_dropped) return;
    request->is_large |= num_bytes > kLargeBytes;
    request->is_dropped = request->is_large && large_responses_.is_full(request.get(), num_bytes, kMaxUnsentBytes);
    if (request->is_dropped) request->note_cancelled();
    if (request->is_dropped && !is_final) cancel(handle);
  }
  if (request->is_dropped)
    fail(request, {TRITONSERVER_ERROR_UNAVAILABLE, kNotSent});
  else if (request->is_large)
    large_responses_.post(request.get(), num_bytes, [request, bytes = std::string(begin, num_bytes)] {
      FrameReader own(bytes.data(), bytes.data() + bytes.size());
      request->answer(own);
    });
  else
    request->answer(response);
}

}  // namespace faser
