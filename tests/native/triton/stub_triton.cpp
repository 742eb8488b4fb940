#include "stub_triton.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

namespace {

using stub::broken;

std::atomic<int> held{0};
std::atomic<size_t> log_lines{0};

// The first member of every Triton object: marks the object as alive and counts the objects that the backend holds.
class Marked {
 public:
  explicit Marked(uint32_t kind) : mark_(kind) { held.fetch_add(1, std::memory_order_relaxed); }
  ~Marked() {
    mark_.store(0, std::memory_order_relaxed);
    held.fetch_sub(1, std::memory_order_relaxed);
  }
  void check(uint32_t kind, const char* what) const {
    if (mark_.load(std::memory_order_relaxed) != kind) broken(std::string(what) + " is used that is none, or no more");
  }

 private:
  std::atomic<uint32_t> mark_;
};

constexpr uint32_t kError = 0xfa5e0001, kMessage = 0xfa5e0002, kParameter = 0xfa5e0003, kArgs = 0xfa5e0004,
                   kRequest = 0xfa5e0005, kFactory = 0xfa5e0006, kResponse = 0xfa5e0007, kModel = 0xfa5e0008,
                   kInstance = 0xfa5e0009;

}  // namespace

struct TRITONSERVER_Error {
  Marked marked{kError};
  TRITONSERVER_Error_Code code;
  std::string message;
};

struct TRITONSERVER_Message {
  Marked marked{kMessage};
  std::string json;
};

struct TRITONSERVER_Parameter {
  Marked marked{kParameter};
  std::string name, value;
};

struct TRITONSERVER_MetricArgs {
  Marked marked{kArgs};
  std::vector<double> buckets;
};

struct TRITONSERVER_MetricFamily {
  TRITONSERVER_MetricKind kind;
  std::string name;
};

struct TRITONSERVER_Metric {
  const TRITONSERVER_MetricFamily* family;
  std::atomic<double> value{0};
  std::atomic<bool> in_use{false};  // no two threads at once, unless it is a counter
};

struct TRITONBACKEND_Model {
  Marked marked{kModel};
  std::string name, repository, config, fails;
  void* state = nullptr;
  std::atomic<int> num_users{0};  // requests, factories and responses
};

struct TRITONBACKEND_ModelInstance {
  Marked marked{kInstance};
  TRITONBACKEND_Model* model;
  std::atomic<bool> executes{false};
};

namespace {

// Keeps a model until the last object of its requests is gone.
class User {
 public:
  explicit User(TRITONBACKEND_Model* model) : model_(model) { model_->num_users.fetch_add(1); }
  User(const User& other) : User(other.model_) {}
  User& operator=(const User&) = delete;
  ~User() { model_->num_users.fetch_sub(1); }

 private:
  TRITONBACKEND_Model* model_;
};

// State that the response factory of a request shares with its responses.
struct Stream {
  std::shared_ptr<stub::Request> client;
  std::atomic<bool> is_final{false};
  std::atomic<bool> in_use{false};  // no two threads answer a request at once
};

class InUse {
 public:
  InUse(std::atomic<bool>& flag, const char* rule) : flag_(flag) {
    if (flag_.exchange(true, std::memory_order_relaxed)) broken(rule);
  }
  ~InUse() { flag_.store(false, std::memory_order_relaxed); }

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

struct TRITONBACKEND_Input {
  stub::Input* input;
  TRITONBACKEND_Request* request;
};

struct TRITONBACKEND_Request {
  Marked marked{kRequest};
  User user;
  std::shared_ptr<Stream> stream;
  std::vector<TRITONBACKEND_Input> inputs;
  bool has_factory = false;
};

struct TRITONBACKEND_ResponseFactory {
  Marked marked{kFactory};
  User user;
  std::shared_ptr<Stream> stream;
};

struct TRITONBACKEND_Output {
  TRITONBACKEND_Response* response;
  stub::Output output;
  bool has_buffer = false;
  std::unique_ptr<char[]> buffer;  // of the very size that was asked for
  size_t num_bytes = 0;
};

struct TRITONBACKEND_Response {
  Marked marked{kResponse};
  User user;
  std::shared_ptr<Stream> stream;
  std::vector<std::unique_ptr<TRITONBACKEND_Output>> outputs;
};

namespace stub {

std::atomic<uint32_t> api_minor{19};
std::atomic<const char*> failing_metric_function{nullptr};
std::atomic<bool> prints_log{false};

void broken(const std::string& rule) {
  std::fprintf(stderr, "the backend breaks a rule of Triton: %s\n", rule.c_str());
  std::abort();
}

int num_held() { return held.load(); }
size_t num_log_lines() { return log_lines.load(); }

void Request::add(Response response, bool is_final) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_done_) broken("a response follows the final one");
  num_responses_ += response.outputs.empty() && response.error.empty() ? 0 : 1;
  if (keeps_responses) responses_.push_back(std::move(response));
  is_done_ = is_final;
  changed_.notify_all();
}

void Request::wait() {
  if (!wait_for(60)) broken("a request has had no final response for 60 s");
}

bool Request::wait_for(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_done_; });
}

void Request::wait_for_responses(size_t count) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return is_done_ || num_responses_ >= count; });
}

std::vector<Response> Request::responses() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return responses_;
}

namespace {

std::string taken(TRITONSERVER_Error* error) {
  if (error == nullptr) return "";
  const std::string message = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  return message.empty() ? "an error without a message" : message;
}

}  // namespace

Model::Model(std::string name, std::string config)
    : model_(new TRITONBACKEND_Model), instance_(new TRITONBACKEND_ModelInstance) {
  model_->name = std::move(name);
  model_->repository = "/nowhere/" + model_->name;
  model_->config = std::move(config);
  instance_->model = model_.get();
}

Model::~Model() { unload(); }

std::string Model::load() {
  model_->fails = fails;
  const std::string error = taken(TRITONBACKEND_ModelInitialize(model_.get()));
  is_loaded_ = error.empty();
  return error;
}

void Model::execute(const std::vector<std::shared_ptr<Request>>& requests) {
  const InUse use(instance_->executes, "an instance executes twice at once");
  std::vector<TRITONBACKEND_Request*> given;
  for (const auto& request : requests) {
    auto stream = std::make_shared<Stream>();
    stream->client = request;
    auto* const made = new TRITONBACKEND_Request{Marked{kRequest}, User{model_.get()}, std::move(stream), {}};
    for (Input& input : request->inputs) made->inputs.push_back({&input, made});
    given.push_back(made);
  }
  const std::string error =
      taken(TRITONBACKEND_ModelInstanceExecute(instance_.get(), given.data(), static_cast<uint32_t>(given.size())));
  if (error.empty()) return;
  for (size_t i = 0; i < given.size(); ++i) {  // they are Triton's again
    given[i]->marked.check(kRequest, "a request that was given back");
    requests[i]->add({{}, error, TRITONSERVER_ERROR_INTERNAL}, true);
    delete given[i];
  }
}

bool Model::is_ready() { return taken(TRITONBACKEND_ModelInstanceReady(instance_.get())).empty(); }

void Model::unload() {
  if (!is_loaded_) return;
  is_loaded_ = false;
  while (model_->num_users.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (const std::string error = taken(TRITONBACKEND_ModelFinalize(model_.get())); !error.empty())
    broken("a model cannot be finalized: " + error);
}

// The server's metrics.
namespace {

struct Metrics {
  std::mutex mutex;
  std::map<std::string, TRITONSERVER_Metric*> metrics;
};

Metrics& metrics() {
  static Metrics* const found = new Metrics;
  return *found;
}

}  // namespace

double metric(const std::string& name) {
  const std::lock_guard<std::mutex> lock(metrics().mutex);
  const auto found = metrics().metrics.find(name);
  return found == metrics().metrics.end() ? std::nan("") : found->second->value.load();
}

}  // namespace stub

namespace {

TRITONSERVER_Error* failure(const char* function) {
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, (std::string(function) + " failed").c_str());
}

template <typename Owner>
bool fails(const Owner& owner, const char* function) {
  return owner.fails == function;
}

bool metric_fails(const char* function) {
  const char* const failing = stub::failing_metric_function.load();
  return failing != nullptr && std::strcmp(failing, function) == 0;
}

stub::Request& client_of(TRITONBACKEND_Request* request) {
  if (request == nullptr) broken("a request is NULL");
  request->marked.check(kRequest, "a request");
  return *request->stream->client;
}

TRITONBACKEND_Model& checked(TRITONBACKEND_Model* model) {
  model->marked.check(kModel, "a model");
  return *model;
}

}  // namespace

#define FAIL_IF(owner, function) \
  if (fails(owner, function)) return failure(function)

extern "C" {

TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* message) {
  return new TRITONSERVER_Error{Marked{kError}, code, message};
}

void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) {
  error->marked.check(kError, "an error");
  delete error;
}

const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error) {
  error->marked.check(kError, "an error");
  return error->message.c_str();
}

TRITONSERVER_Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char* file, int, const char* message) {
  if (file == nullptr || message == nullptr) broken("a log line has no text");
  if (stub::prints_log) std::fprintf(stderr, "%s\n", message);
  log_lines.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message* message, const char** base,
                                                        size_t* size) {
  message->marked.check(kMessage, "a message");
  if (message->json == "unserializable") return failure("MessageSerializeToJson");
  *base = message->json.data();
  *size = message->json.size();
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message* message) {
  message->marked.check(kMessage, "a message");
  delete message;
  return nullptr;
}

TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char* name, TRITONSERVER_ParameterType type,
                                                  const void* value) {
  if (type != TRITONSERVER_PARAMETER_STRING) broken("a label is no text");
  return new TRITONSERVER_Parameter{Marked{kParameter}, name, static_cast<const char*>(value)};
}

void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter) {
  parameter->marked.check(kParameter, "a parameter");
  delete parameter;
}

TRITONSERVER_Error* TRITONSERVER_MetricFamilyNew(TRITONSERVER_MetricFamily** family, TRITONSERVER_MetricKind kind,
                                                 const char* name, const char*) {
  if (metric_fails("MetricFamilyNew")) return failure("MetricFamilyNew");
  if (kind < TRITONSERVER_METRIC_KIND_COUNTER || kind > TRITONSERVER_METRIC_KIND_HISTOGRAM)
    return failure("a family of an unknown kind");
  *family = new TRITONSERVER_MetricFamily{kind, name};
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs** args) {
  if (metric_fails("MetricArgsNew")) return failure("MetricArgsNew");
  *args = new TRITONSERVER_MetricArgs;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsSetHistogram(TRITONSERVER_MetricArgs* args, const double* buckets,
                                                        uint64_t num_buckets) {
  args->marked.check(kArgs, "metric arguments");
  args->buckets.assign(buckets, buckets + num_buckets);
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs* args) {
  args->marked.check(kArgs, "metric arguments");
  delete args;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricNewWithArgs(TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family,
                                                   const TRITONSERVER_Parameter** labels, uint64_t num_labels,
                                                   const TRITONSERVER_MetricArgs* args) {
  if (metric_fails("MetricNewWithArgs")) return failure("MetricNewWithArgs");
  const bool is_histogram = family->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM;
  if (is_histogram != (args != nullptr)) return failure("a metric whose arguments are not of its kind");
  std::string name = family->name + "{";
  for (uint64_t i = 0; i < num_labels; ++i) {
    labels[i]->marked.check(kParameter, "a label");
    name += (i > 0 ? "," : "") + labels[i]->name + "=" + labels[i]->value;
  }
  name += "}";
  *metric = new TRITONSERVER_Metric{family};
  const std::lock_guard<std::mutex> lock(stub::metrics().mutex);
  stub::metrics().metrics[name] = *metric;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value) {
  if (metric->family->kind == TRITONSERVER_METRIC_KIND_HISTOGRAM) return failure("a histogram's increment");
  if (metric->family->kind == TRITONSERVER_METRIC_KIND_COUNTER && value < 0) return failure("a counter's decrement");
  double before = metric->value.load(std::memory_order_relaxed);
  while (!metric->value.compare_exchange_weak(before, before + value, std::memory_order_relaxed)) continue;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value) {
  if (metric->family->kind != TRITONSERVER_METRIC_KIND_GAUGE) return failure("the setting of what is no gauge");
  metric->value.store(value, std::memory_order_relaxed);
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_MetricObserve(TRITONSERVER_Metric* metric, double) {
  if (metric->family->kind != TRITONSERVER_METRIC_KIND_HISTOGRAM) return failure("the observation of no histogram");
  const InUse use(metric->in_use, "two threads observe one histogram");  // Triton 2.51 ends at that
  metric->value.store(metric->value.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) {
  if (stub::api_minor == 0) return failure("ApiVersion");
  *major = 1;
  *minor = stub::api_minor;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name) {
  FAIL_IF(checked(model), "ModelName");
  *name = model->name.c_str();
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* model, uint64_t* version) {
  FAIL_IF(checked(model), "ModelVersion");
  *version = 1;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* type,
                                                  const char** location) {
  FAIL_IF(checked(model), "ModelRepository");
  *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  *location = model->repository.c_str();
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelConfig(TRITONBACKEND_Model* model, uint32_t config_version,
                                              TRITONSERVER_Message** config) {
  if (config_version != 1) broken("a configuration of another version than 1");
  FAIL_IF(checked(model), "ModelConfig");
  *config = new TRITONSERVER_Message{
      Marked{kMessage}, fails(*model, "MessageSerializeToJson") ? std::string("unserializable") : model->config};
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model* model, void** state) {
  FAIL_IF(checked(model), "ModelState");
  *state = model->state;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* model, void* state) {
  checked(model).state = state;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance* instance,
                                                     TRITONBACKEND_Model** model) {
  instance->marked.check(kInstance, "an instance");
  FAIL_IF(*instance->model, "ModelInstanceModel");
  *model = instance->model;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(TRITONBACKEND_ModelInstance* instance,
                                                                TRITONBACKEND_Request* request, bool, uint64_t start,
                                                                uint64_t compute_start, uint64_t compute_end,
                                                                uint64_t end) {
  instance->marked.check(kInstance, "an instance");
  FAIL_IF(client_of(request), "ModelInstanceReportStatistics");
  if (start > compute_start || compute_start > compute_end || compute_end > end) broken("times run backwards");
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(TRITONBACKEND_ModelInstance* instance,
                                                                     uint64_t batch_size, uint64_t start,
                                                                     uint64_t compute_start, uint64_t compute_end,
                                                                     uint64_t end) {
  instance->marked.check(kInstance, "an instance");
  if (batch_size == 0) broken("a batch of no request");
  if (start > compute_start || compute_start > compute_end || compute_end > end) broken("times run backwards");
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id) {
  FAIL_IF(client_of(request), "RequestId");
  *id = client_of(request).id;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  FAIL_IF(client_of(request), "RequestInputCount");
  *count = static_cast<uint32_t>(request->inputs.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request* request, uint32_t index,
                                                      TRITONBACKEND_Input** input) {
  FAIL_IF(client_of(request), "RequestInputByIndex");
  if (index >= request->inputs.size()) broken("an input that is not there");
  *input = &request->inputs[index];
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_InputProperties(TRITONBACKEND_Input* input, const char** name,
                                                  TRITONSERVER_DataType* datatype, const int64_t** shape,
                                                  uint32_t* num_dims, uint64_t* num_bytes, uint32_t* num_buffers) {
  FAIL_IF(client_of(input->request), "InputProperties");
  *name = input->input->name.c_str();
  *datatype = static_cast<TRITONSERVER_DataType>(input->input->datatype);
  *shape = input->input->shape.data();
  *num_dims = static_cast<uint32_t>(input->input->shape.size());
  *num_bytes = input->input->num_missing_bytes;
  for (const std::string& buffer : input->input->buffers) *num_bytes += buffer.size();
  *num_buffers = static_cast<uint32_t>(input->input->buffers.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_InputBuffer(TRITONBACKEND_Input* input, uint32_t index, const void** buffer,
                                              uint64_t* num_bytes, TRITONSERVER_MemoryType* memory,
                                              int64_t* memory_id) {
  FAIL_IF(client_of(input->request), "InputBuffer");
  if (index >= input->input->buffers.size()) broken("a buffer of an input that is not there");
  if (*memory != TRITONSERVER_MEMORY_CPU || *memory_id != 0) broken("no host memory is preferred for an input");
  *buffer = input->input->buffers[index].data();
  *num_bytes = input->input->buffers[index].size();
  if (input->input->is_on_gpu) *memory = TRITONSERVER_MEMORY_GPU;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  FAIL_IF(client_of(request), "RequestOutputCount");
  *count = static_cast<uint32_t>(client_of(request).outputs.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* request, uint32_t index, const char** name) {
  FAIL_IF(client_of(request), "RequestOutputName");
  if (index >= client_of(request).outputs.size()) broken("an output that is not there");
  *name = client_of(request).outputs[index].c_str();
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count) {
  FAIL_IF(client_of(request), "RequestParameterCount");
  *count = static_cast<uint32_t>(client_of(request).parameters.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameter(TRITONBACKEND_Request* request, uint32_t index, const char** key,
                                                   TRITONSERVER_ParameterType* type, const void** value) {
  FAIL_IF(client_of(request), "RequestParameter");
  if (index >= client_of(request).parameters.size()) broken("a parameter that is not there");
  *key = client_of(request).parameters[index].first.c_str();
  *type = TRITONSERVER_PARAMETER_STRING;
  *value = client_of(request).parameters[index].second.c_str();
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t flags) {
  client_of(request);
  if (flags != TRITONSERVER_REQUEST_RELEASE_ALL) broken("a request is not released for good");
  // This is not a rule of Triton's, but nobody could ever answer such a request.
  if (!request->has_factory && !request->stream->is_final.load(std::memory_order_relaxed))
    broken("a request is released that nobody can answer");
  delete request;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory** factory,
                                                     TRITONBACKEND_Request* request) {
  FAIL_IF(client_of(request), "ResponseFactoryNew");
  request->has_factory = true;
  *factory = new TRITONBACKEND_ResponseFactory{Marked{kFactory}, request->user, request->stream};
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory) {
  factory->marked.check(kFactory, "a response factory");
  const std::shared_ptr<Stream> stream = factory->stream;
  const InUse use(stream->in_use, "a factory is deleted while a thread uses it");
  if (!stream->is_final.load(std::memory_order_relaxed)) broken("a factory is deleted before the final flag was sent");
  delete factory;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory* factory, bool* cancelled) {
  factory->marked.check(kFactory, "a response factory");
  FAIL_IF(*factory->stream->client, "ResponseFactoryIsCancelled");
  *cancelled = factory->stream->client->is_cancelled.load(std::memory_order_relaxed);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, uint32_t flags) {
  factory->marked.check(kFactory, "a response factory");
  const InUse use(factory->stream->in_use, "two threads answer one request at once");
  if (flags != TRITONSERVER_RESPONSE_COMPLETE_FINAL) broken("flags without a response that are not the final one");
  if (factory->stream->is_final.exchange(true, std::memory_order_relaxed)) broken("a second final flag");
  factory->stream->client->add({}, true);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response** response,
                                                         TRITONBACKEND_ResponseFactory* factory) {
  factory->marked.check(kFactory, "a response factory");
  const InUse use(factory->stream->in_use, "two threads answer one request at once");
  *response = nullptr;
  FAIL_IF(*factory->stream->client, "ResponseNewFromFactory");
  *response = new TRITONBACKEND_Response{Marked{kResponse}, factory->user, factory->stream, {}};
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* request) {
  *response = nullptr;
  FAIL_IF(client_of(request), "ResponseNew");
  *response = new TRITONBACKEND_Response{Marked{kResponse}, request->user, request->stream, {}};
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response) {
  response->marked.check(kResponse, "a response");
  delete response;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response* response, TRITONBACKEND_Output** output,
                                                 const char* name, TRITONSERVER_DataType datatype, const int64_t* shape,
                                                 uint32_t num_dims) {
  response->marked.check(kResponse, "a response");
  const InUse use(response->stream->in_use, "two threads answer one request at once");
  // Triton, too, adds the output before it finds out that the model has no output of that name.
  response->outputs.push_back(std::make_unique<TRITONBACKEND_Output>());
  TRITONBACKEND_Output& added = *response->outputs.back();
  added.response = response;
  added.output = {name, datatype, std::vector<int64_t>(shape, shape + num_dims), ""};
  FAIL_IF(*response->stream->client, "ResponseOutput");
  *output = &added;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** buffer, uint64_t num_bytes,
                                               TRITONSERVER_MemoryType* memory, int64_t* memory_id) {
  output->response->marked.check(kResponse, "a response");
  stub::Request& client = *output->response->stream->client;
  FAIL_IF(client, "OutputBuffer");
  if (*memory != TRITONSERVER_MEMORY_CPU || *memory_id != 0) broken("no host memory is preferred for an output");
  if (output->has_buffer) broken("a second buffer of one output");
  output->has_buffer = true;
  output->num_bytes = num_bytes;
  output->buffer.reset(num_bytes > 0 ? new char[num_bytes] : nullptr);
  *buffer = output->buffer.get();
  if (client.fails == "OutputBuffer is on a GPU") *memory = TRITONSERVER_MEMORY_GPU;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response* response, uint32_t flags,
                                               TRITONSERVER_Error* error) {
  response->marked.check(kResponse, "a response");
  const std::shared_ptr<Stream> stream = response->stream;
  const InUse use(stream->in_use, "two threads answer one request at once");
  if (flags != 0 && flags != TRITONSERVER_RESPONSE_COMPLETE_FINAL) broken("a response has unknown flags");
  stub::Response sent;
  if (error != nullptr) {
    error->marked.check(kError, "an error");
    sent.error = error->message.empty() ? "an error without a message" : error->message;
    sent.code = error->code;
  }
  for (const auto& output : response->outputs) {
    if (error != nullptr) break;
    if (!output->has_buffer) broken("an output has no buffer");
    if (output->num_bytes > 0) output->output.bytes.assign(output->buffer.get(), output->num_bytes);
    sent.outputs.push_back(std::move(output->output));
  }
  const bool is_final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL;
  if (stream->is_final.load(std::memory_order_relaxed)) broken("a response follows the final one");
  if (is_final) stream->is_final.store(true, std::memory_order_relaxed);
  for (int ms = 0; ms < stream->client->send_ms; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  delete response;
  stream->client->add(std::move(sent), is_final);
  return nullptr;
}
}

#include "stub_request.h"

StubRequest::StubRequest() : StubRequest(std::make_shared<stub::Request>()) {}

StubRequest::StubRequest(std::shared_ptr<stub::Request> of_client)
    : client(std::move(of_client)), model_(new TRITONBACKEND_Model) {
  auto stream = std::make_shared<Stream>();
  stream->client = client;
  request = new TRITONBACKEND_Request{Marked{kRequest}, User{model_.get()}, std::move(stream), {}};
  for (stub::Input& input : client->inputs) request->inputs.push_back({&input, request});
}

StubRequest::~StubRequest() {
  delete request;
  if (model_->num_users.load() != 0) broken("something of a request is left");
}
