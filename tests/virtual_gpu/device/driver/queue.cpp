// Streams, events, host functions and captures.
#include <chrono>
#include <cstdlib>

#include "driver.h"

namespace virtual_gpu {

namespace {

thread_local Stream* capturing = nullptr;
thread_local bool in_work = false;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_ready(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const Work& first = stream.queue.front();
  return first.waits_for == nullptr || first.waits_for->num_done >= first.number;
}

struct EventHandle {
  std::shared_ptr<Event> event = std::make_shared<Event>();
};

Status make_stream(void** handle, Green* green) {
  Stream* stream = new Stream;
  stream->green = green;
  device().streams.insert(stream);
  *handle = stream;
  return kDone;
}

}  // namespace

Device& device() {
  static Device* made = [] {
    Device* device = new Device;
    const char* seed = std::getenv("VIRTUAL_GPU_SEED");
    device->random.seed(seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10));
    return device;
  }();
  return *made;
}

Stream* find_stream(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return &device().null_stream;
  Stream* stream = static_cast<Stream*>(handle);
  return device().streams.count(stream) && is_context(context_handle(stream)) ? stream : nullptr;
}

Status no_stream(void* handle) {
  Stream* stream = static_cast<Stream*>(handle);
  const bool was_one = device().streams.count(stream) || device().destroyed_streams.count(stream);
  return was_one && !is_context(context_handle(stream)) ? kContextDestroyed : kInvalidHandle;
}

bool is_context(const void* context) {
  return context == reinterpret_cast<void*>(kPrimaryContext) || is_handle(const_cast<void*>(context));
}

void* context_handle(const Stream* stream) {
  return stream->green != nullptr ? stream->green : reinterpret_cast<void*>(kPrimaryContext);
}

bool may_wait() { return !in_work && capturing == nullptr; }

Status refuse_while_capturing(const char* name) {
  if (in_work) return kNotPermitted;
  if (capturing == nullptr) return kDone;
  say(std::string(name) + " while a stream captures");
  capturing->is_invalidated = true;
  return kCaptureUnsupported;
}

Status enqueue(Stream* stream, Work work) {
  if (device().failure != kDone) return device().failure;
  if (stream->capture != nullptr) {
    stream->capture->nodes.push_back({context_handle(stream), std::move(work)});
    return kDone;
  }
  stream->queue.push_back(std::move(work));
  stream->num_enqueued++;
  return kDone;
}

Status run_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done) {
  Device& all = device();
  while (!is_done()) {
    if (all.failure != kDone) return all.failure;
    if (all.is_busy) {
      all.moved.wait(lock);
      continue;
    }
    std::vector<Stream*> ready;
    if (is_ready(all.null_stream)) ready.push_back(&all.null_stream);
    for (Stream* stream : all.streams) {
      if (is_ready(*stream)) ready.push_back(stream);
    }
    if (ready.empty()) {
      say("nothing is queued that the host could wait for, or streams wait for each other");
      return all.failure = kLaunchFailed;
    }
    Stream* stream = ready[all.random() % ready.size()];
    Work work = stream->queue.front();
    all.is_busy = true;
    lock.unlock();
    in_work = true;
    Status status = work.run();
    work.run = nullptr;  // what it holds may call the driver when it goes
    in_work = false;
    lock.lock();
    all.is_busy = false;
    count_work(stream, work.label);
    if (status != kDone && all.failure == kDone) all.failure = status;
    auto body = status == kDone && work.body != nullptr ? stream->queue.front().body() : std::vector<Work>();
    if (body.empty()) {
      stream->queue.pop_front();
      if (!work.is_in_loop) stream->num_done++;
    }
    stream->queue.insert(stream->queue.begin(), body.begin(), body.end());
    all.moved.notify_all();
  }
  return all.failure;
}

Status wait_for(std::unique_lock<std::mutex>& lock, Stream* stream) {
  count_wait(Label::take("cuStreamSynchronize"));
  const uint64_t last = stream->num_enqueued;
  return run_until(lock, [stream, last] { return stream->num_done >= last; });
}

}  // namespace virtual_gpu

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

CALL(cuStreamCreate, void** stream, unsigned flags) {
  Lock lock(device().mutex);
  make_stream(stream, nullptr);
  return flags == 1 ? logged(__func__) : kInvalidValue;
}
CALL(cuStreamCreateWithPriority, void** stream, unsigned flags, int priority) {
  Lock lock(device().mutex);
  make_stream(stream, nullptr);
  const char* note = priority == -5 ? " first" : priority == 0 ? " last" : " wrong";
  return flags == 1 ? logged(__func__, note) : kInvalidValue;
}
CALL(cuGreenCtxStreamCreate, void** stream, void* green, unsigned flags, int) {
  Lock lock(device().mutex);
  if (!is_handle(green) || flags != 1) return kInvalidValue;
  make_stream(stream, static_cast<Green*>(green));
  return logged(__func__);
}
CALL(cuStreamDestroy, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);  // it must go before its context
  if (stream == &device().null_stream) return kInvalidHandle;
  const Status status = run_until(lock, [stream] { return stream->queue.empty(); });
  device().streams.erase(stream);
  device().destroyed_streams.insert(stream);
  return status == kDone ? logged(__func__) : status;
}
CALL(cuStreamSynchronize, void* handle) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  Stream* stream = find_stream(handle);
  return stream == nullptr ? no_stream(handle) : wait_for(lock, stream);
}
CALL(cuCtxSynchronize) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  count_wait(Label::take(__func__));
  return run_until(lock, [] {
    bool all = device().null_stream.queue.empty();
    for (Stream* stream : device().streams) all = all && stream->queue.empty();
    return all;
  });
}
CALL(cuStreamWaitEvent, void* handle, void* event, unsigned) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (!is_handle(event)) return kInvalidHandle;
  if (stream->capture != nullptr) return kCaptureUnsupported;  // graphs of several streams do not exist here
  auto& held = static_cast<EventHandle*>(event)->event;
  return enqueue(stream, {"wait for an event", [] { return kDone; }, held, held->num_recorded});
}
// As cuLaunchHostFunc, with a name; the bindings free what they give that one after its first run, so that a graph with
// host functions cannot be launched twice.
CALL(virtual_gpu_host_function, void* handle, void (*function)(void*), void* data, const char* label) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  return enqueue(stream, {label, [function, data] {
                            function(data);
                            return device().failure;
                          }});
}

CALL(cuEventCreate, void** event, unsigned) {
  Lock lock(device().mutex);
  *event = new EventHandle;
  device().handles.insert(*event);
  return kDone;
}
CALL(cuEventDestroy, void* event) {
  Lock lock(device().mutex);
  if (device().handles.erase(event) == 0) return kInvalidHandle;
  delete static_cast<EventHandle*>(event);
  return kDone;
}
CALL(cuEventRecord, void* event, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (!is_handle(event)) return kInvalidHandle;
  if (stream->capture != nullptr) return kCaptureUnsupported;
  auto held = static_cast<EventHandle*>(event)->event;
  const uint64_t number = ++held->num_recorded;
  return enqueue(stream, {"record an event", [held, number] {
                            Lock lock(device().mutex);
                            held->num_done = number;
                            held->ms = now_ms();
                            return kDone;
                          }});
}
CALL(cuEventQuery, void* event) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  if (!is_handle(event)) return kInvalidHandle;
  const Event& held = *static_cast<EventHandle*>(event)->event;
  return held.num_done == held.num_recorded ? kDone : kNotReady;
}
CALL(cuEventSynchronize, void* event) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  if (!is_handle(event)) return kInvalidHandle;
  count_wait(Label::take(__func__));
  auto held = static_cast<EventHandle*>(event)->event;
  const uint64_t number = held->num_recorded;
  return run_until(lock, [held, number] { return held->num_done >= number; });
}
CALL(cuEventElapsedTime, float* ms, void* begin, void* end) {
  Lock lock(device().mutex);
  if (!is_handle(begin) || !is_handle(end)) return kInvalidHandle;
  const Event &from = *static_cast<EventHandle*>(begin)->event, &to = *static_cast<EventHandle*>(end)->event;
  if (from.num_recorded == 0 || to.num_recorded == 0) return kInvalidHandle;
  if (from.num_done < from.num_recorded || to.num_done < to.num_recorded) return kNotReady;
  *ms = static_cast<float>(to.ms - from.ms);
  return kDone;
}
CALL(cuStreamGetCtx, void* handle, void** context) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  *context = context_handle(stream);
  return kDone;
}

CALL(cuStreamIsCapturing, void* handle, int* status) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  *status = stream->capture == nullptr ? 0 : stream->is_invalidated ? 2 : 1;
  return kDone;
}
// Modes other than thread-local (1) do not exist here.
CALL(cuStreamBeginCapture, void* handle, int mode) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (mode != 1 || stream == &device().null_stream) return kNotSupported;
  if (stream->capture != nullptr || capturing != nullptr) return kCaptureUnmatched;
  stream->capture = std::make_shared<Graph>();
  stream->is_invalidated = false;
  capturing = stream;
  return kDone;
}
CALL(cuStreamEndCapture, void* handle, void** graph) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr || capturing != stream) return kCaptureUnmatched;
  capturing = nullptr;
  auto captured = std::move(stream->capture);
  stream->capture = nullptr;
  if (stream->is_invalidated) return kCaptureInvalidated;
  *graph = new GraphHandle{captured};
  device().handles.insert(*graph);
  return kDone;
}
