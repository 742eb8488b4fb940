// A Triton server without a network, for the backend `faser`: it gives requests, takes responses, and aborts where the
// backend breaks a rule of Triton's headers (tritonbackend.h, tritonserver.h). Its objects are checked by their own
// atomic marks: a lock that all calls share would order the backend's threads, and ThreadSanitizer would see no race.
#ifndef FASER_STUB_TRITON_H_
#define FASER_STUB_TRITON_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "triton_api.h"

namespace stub {

// An input of a request: its bytes in any number of buffers.
struct Input {
  std::string name;
  int datatype;
  std::vector<int64_t> shape;
  std::vector<std::string> buffers;
  uint64_t num_missing_bytes = 0;  // that the input says it has more than its buffers hold
  bool is_on_gpu = false;
};

struct Output {
  std::string name;
  int datatype;
  std::vector<int64_t> shape;
  std::string bytes;
};

struct Response {
  std::vector<Output> outputs;
  std::string error;  // empty: none
  int code = -1;
};

// A request and what its client sees of it. The client's thread waits; any thread of the backend answers.
class Request {
 public:
  const char* id = nullptr;  // NULL: it has none, as Triton's header allows
  std::vector<Input> inputs;
  std::vector<std::string> outputs;
  std::vector<std::pair<std::string, std::string>> parameters;
  std::string fails;            // the function of Triton that fails for this request
  std::atomic<int> send_ms{0};  // what a response takes the sending thread
  bool keeps_responses = true;

  void cancel() { is_cancelled = true; }
  // Waits for the last response.
  void wait();
  bool wait_for(double seconds);
  // Waits until there are so many responses, or the last one.
  void wait_for_responses(size_t count);
  std::vector<Response> responses();

  std::atomic<bool> is_cancelled{false};

  // For the stub's own functions.
  void add(Response response, bool is_final);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Response> responses_;
  size_t num_responses_ = 0;
  bool is_done_ = false;
};

// A model of the server. Its threads follow Triton: execute() is called by one thread at a time, and unload() finalizes
// it when nothing of it is left, on the calling thread, which is none of the backend's.
class Model {
 public:
  Model(std::string name, std::string config);
  ~Model();
  // An empty text, or what the backend says is wrong.
  std::string load();
  void execute(const std::vector<std::shared_ptr<Request>>& requests);
  void execute(const std::shared_ptr<Request>& request) { execute(std::vector{request}); }
  bool is_ready();
  void unload();

  std::string fails;  // the function of Triton that fails for this model

 private:
  std::unique_ptr<TRITONBACKEND_Model> model_;
  std::unique_ptr<TRITONBACKEND_ModelInstance> instance_;
  bool is_loaded_ = false;
};

extern std::atomic<uint32_t> api_minor;                   // what TRITONBACKEND_ApiVersion tells
extern std::atomic<const char*> failing_metric_function;  // NULL: none
extern std::atomic<bool> prints_log;

// Objects of Triton that the backend holds: 0 once all is unloaded. Metrics stay, as the backend keeps them.
int num_held();
// A metric's value by "family{label=value,...}", labels in order; NaN if there is none. A histogram's is the number of
// its observations.
double metric(const std::string& name);
size_t num_log_lines();

// Prints what is wrong and aborts.
[[noreturn]] void broken(const std::string& rule);

}  // namespace stub

extern "C" {
TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*);
TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model);
TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests, uint32_t count);
}

#endif  // FASER_STUB_TRITON_H_
