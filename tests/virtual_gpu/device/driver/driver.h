// The state of the stand-in for libcuda.so.1 (tests/virtual_gpu/__init__.py): one device of 132 SMs.
//
// Work is queued by stream and runs on the thread that waits for something, one item at a time and only as much as is
// waited for, in a random order (seed: $VIRTUAL_GPU_SEED) that streams and events allow. Names are CUDA's.
#ifndef VIRTUAL_GPU_DRIVER_H_
#define VIRTUAL_GPU_DRIVER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#define CALL(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

namespace virtual_gpu {

using Status = int;  // CUresult
constexpr Status kDone = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidImage = 200, kInvalidContext = 201,
                 kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kIllegalAddress = 700, kContextDestroyed = 709,
                 kLaunchFailed = 719, kNotPermitted = 800, kNotSupported = 801, kCaptureUnsupported = 900,
                 kCaptureInvalidated = 901, kCaptureUnmatched = 903, kInvalidConfiguration = 915;

constexpr uint32_t kNumSms = 132;

struct Green {
  uint32_t first, count;  // SMs
};

struct Event {
  uint64_t num_recorded = 0, num_done = 0;
  double ms = 0;  // when the last record was done
};

struct Work {
  std::string label;
  std::function<Status()> run;
  std::shared_ptr<Event> waits_for = nullptr;  // its record number `number` must be done
  uint64_t number = 0;
  // Of a loop in a graph: what runs before it is asked again, nothing once it is over. The mutex is held.
  std::function<std::vector<Work>()> body = nullptr;
  bool is_in_loop = false;  // not queued by itself, so not counted among what is done
};

struct Graph;

struct Condition {  // of a graph's conditional node
  void* context;
  unsigned value, initial;
  bool has_initial, is_set;
  uint64_t setter = 0;          // number of the item that has set it last
  void* body_handle = nullptr;  // of the node's body; nullptr as long as it has no node
};

struct Node {  // with one of work, child and condition
  void* context;
  Work work;
  std::shared_ptr<Graph> child = nullptr;  // also a loop's body
  std::shared_ptr<Condition> condition = nullptr;
  void* handle = nullptr;
};

struct Graph {  // a chain: each node depends on the one before
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<Condition>> conditions;
  unsigned num_instances = 0;
};

struct GraphHandle {  // also of an instance
  std::shared_ptr<Graph> graph;
};

struct Stream {
  Green* green = nullptr;  // nullptr: all SMs
  std::deque<Work> queue;
  uint64_t num_enqueued = 0, num_done = 0;
  std::shared_ptr<Graph> capture = nullptr;
  bool is_invalidated = false;
};

struct Device {
  std::mutex mutex;
  std::condition_variable moved;
  bool is_busy = false;    // some thread runs an item
  Status failure = kDone;  // of an item: every later call returns it
  std::mt19937_64 random;
  Stream null_stream;
  std::set<Stream*> streams, destroyed_streams;  // what is destroyed stays, so that no other gets its address
  std::set<void*> handles;                       // of the other kinds
};

// Never destroyed, since threads may still call at exit.
Device& device();

// Whether the calling thread captures a stream; calls that wait or allocate then fail and invalidate the capture.
Status refuse_while_capturing(const char* name);

// Whether calls that wait are allowed: no stream captures here, and no item runs.
bool may_wait();

// nullptr where the handle is no stream, or one of a green context that was destroyed; what a call then returns.
Stream* find_stream(void* handle);
Status no_stream(void* handle);

// Whether a context is there still: a green one may have been destroyed.
bool is_context(const void* context);

// As cuStreamGetCtx's: of a green context, or the primary one.
void* context_handle(const Stream* stream);
constexpr uintptr_t kPrimaryContext = 0x1000;

// Queues an item, or adds it to the graph that the stream captures. The mutex is held.
Status enqueue(Stream* stream, Work work);

// Runs items until is_done(). The mutex is held through `lock`, but not while an item runs.
Status run_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done);

// Runs all that is queued on a stream. Counted as a wait of the host.
Status wait_for(std::unique_lock<std::mutex>& lock, Stream* stream);

// Memory (memory.cpp), with a mutex of its own.
Status allocate(uintptr_t* address, size_t size, bool is_device);
Status release(uintptr_t address);
// Whether size bytes from here on lie within one live block; says so on stderr if not.
bool is_live(uintptr_t address, size_t size, const std::string& user);
bool is_page_locked(uintptr_t address);
// Whether what lies around the block of this address is as it was.
bool is_border_intact(uintptr_t address, const std::string& user);
size_t bytes_in_use(bool is_device);
size_t total_bytes();

// Counters (report.cpp); the mutex is held.
struct Label {  // of the calling thread's next copy or wait
  static std::string take(const char* otherwise);
};
void count_work(const Stream* stream, const std::string& label);
void count_copy(const char* direction, size_t bytes, const std::string& label);
void count_wait(const std::string& label);
void count_graph(const Stream* stream);
void say(const std::string& line);  // to stderr

// Logs a call to $LIBCUDA_LOG; kNotSupported if $LIBCUDA_FAILS names it.
Status logged(const char* name, const char* note = "");

// Whether $VIRTUAL_GPU_FAILS is "name:number" and this is the call of that number.
bool fails_now(const char* name);

template <typename T>
bool is_handle(T* handle) {
  return device().handles.count(handle) > 0;
}

}  // namespace virtual_gpu

#endif  // VIRTUAL_GPU_DRIVER_H_
