#include "requests.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "log.h"

namespace faser {
namespace {

const char* code_name(TRITONSERVER_Error_Code code) {
  switch (code) {
    case TRITONSERVER_ERROR_INVALID_ARG:
      return "INVALID_ARG";
    case TRITONSERVER_ERROR_UNAVAILABLE:
      return "UNAVAILABLE";
    case TRITONSERVER_ERROR_CANCELLED:
      return "CANCELLED";
    default:
      return "INTERNAL";
  }
}

void put_json_text(std::string& json, const char* name, const std::string& text) {
  json.append(1, '"').append(name).append("\": \"");
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json.append(1, '\\').append(1, c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      json.append(escaped);
    } else {
      json.append(1, c);
    }
  }
  json.append(1, '"');
}

// Returns a Refusal as a JSON object.
std::string json_of(const Refusal& refusal) {
  std::string json = "{";
  put_json_text(json, "code", code_name(refusal.code));
  const std::pair<const char*, const std::string*> fields[] = {
      {"field", &refusal.field}, {"value", &refusal.value}, {"limit", &refusal.limit}, {"message", &refusal.message}};
  for (const auto& [name, text] : fields) {
    if (text->empty()) continue;
    json.append(", ");
    put_json_text(json, name, *text);
  }
  return json.append("}");
}

void require(TRITONSERVER_Error* error, const char* what) {
  if (!succeeded(error, what)) throw std::runtime_error(std::string("the request could not be read: ") + what);
}

void put_input(FrameWriter& frame, TRITONBACKEND_Input* input) {
  const char* name;
  TRITONSERVER_DataType datatype;
  const int64_t* shape;
  uint32_t num_dims, num_buffers;
  uint64_t num_bytes;
  require(TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &num_dims, &num_bytes, &num_buffers), "input");
  frame.put_text(name);
  frame.put(static_cast<uint8_t>(datatype));
  frame.put(num_dims);
  frame.append(shape, num_dims * sizeof(int64_t));
  if (frame.size() + num_bytes > kMaxFrameBytes)
    throw std::runtime_error("the request has at least " + std::to_string(frame.size() + num_bytes) +
                             " bytes, allowed are at most " + std::to_string(kMaxFrameBytes) + "; send less");
  frame.put(num_bytes);
  uint64_t num_put = 0;
  for (uint32_t i = 0; i < num_buffers; ++i) {
    const void* buffer;
    uint64_t size;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    require(TRITONBACKEND_InputBuffer(input, i, &buffer, &size, &memory, &memory_id), "input buffer");
    if (memory == TRITONSERVER_MEMORY_GPU)
      throw std::runtime_error(std::string(name) + " is in GPU memory; send it in host memory");
    frame.append(buffer, size);
    num_put += size;
  }
  if (num_put != num_bytes)
    throw std::runtime_error(std::string(name) + " has fewer bytes than it says; send it again");
}

void end_with_error(TRITONBACKEND_Response* response, const Refusal& refusal, bool wants_code) {
  const std::string message = wants_code ? json_of(refusal) : refusal.message;
  TRITONSERVER_Error* const error = TRITONSERVER_ErrorNew(refusal.code, message.c_str());
  succeeded(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error), "error");
  TRITONSERVER_ErrorDelete(error);
}

bool ends_request(uint8_t flags) { return flags & (kFinal | kError); }

}  // namespace

bool OpenRequest::was_cancelled() {
  bool is_cancelled = false;
  if (!is_noted_) succeeded(TRITONBACKEND_ResponseFactoryIsCancelled(factory_, &is_cancelled), "cancellation");
  return is_cancelled;
}

void OpenRequest::answer(FrameReader& body) {
  const uint8_t flags = body.take<uint8_t>();
  const bool is_final = ends_request(flags);
  if (flags & kError) {
    Refusal refusal{static_cast<TRITONSERVER_Error_Code>(body.take<uint8_t>()), body.take_text()};
    refusal.field = body.take_text();
    refusal.value = body.take_text();
    refusal.limit = body.take_text();
    send_error(refusal);
  } else if (flags & kOutputs) {
    send_outputs(body, is_final);
  }
  if (is_final) close();
}

void OpenRequest::fail(const Refusal& refusal) {
  send_error(refusal);
  close();
}

void OpenRequest::send_outputs(FrameReader& body, bool is_final) {
  TRITONBACKEND_Response* response = nullptr;
  if (!succeeded(TRITONBACKEND_ResponseNewFromFactory(&response, factory_), "response")) response = nullptr;
  TRITONSERVER_Error* error = nullptr;
  for (uint16_t i = 0, count = body.take<uint16_t>(); i < count; ++i) {
    const uint8_t name_size = body.take<uint8_t>();
    const char* const name = body.take_bytes(name_size + 1);  // with its final '\0'
    const auto datatype = static_cast<TRITONSERVER_DataType>(body.take<uint8_t>());
    const uint8_t num_dims = body.take<uint8_t>();
    int64_t shape[256];
    std::memcpy(shape, body.take_bytes(num_dims * sizeof(int64_t)), num_dims * sizeof(int64_t));
    const uint32_t num_bytes = body.take<uint32_t>();
    const char* const bytes = body.take_bytes(num_bytes);
    if (response == nullptr || error != nullptr) continue;
    TRITONBACKEND_Output* output;
    error = TRITONBACKEND_ResponseOutput(response, &output, name, datatype, shape, num_dims);
    if (error != nullptr) continue;
    void* buffer;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    error = TRITONBACKEND_OutputBuffer(output, &buffer, num_bytes, &memory, &memory_id);
    if (error != nullptr) continue;
    if (memory == TRITONSERVER_MEMORY_GPU)
      error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, "outputs in GPU memory are not supported");
    else if (num_bytes > 0)
      std::memcpy(buffer, bytes, num_bytes);
  }
  if (response != nullptr) {
    const uint32_t sent_flags = is_final ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0;
    has_ended_ = succeeded(TRITONBACKEND_ResponseSend(response, sent_flags, error), "response") && is_final;
  }
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

void OpenRequest::send_error(const Refusal& refusal) {
  TRITONBACKEND_Response* response;
  if (!succeeded(TRITONBACKEND_ResponseNewFromFactory(&response, factory_), "response")) return;
  end_with_error(response, refusal, wants_code_);
  has_ended_ = true;
}

void OpenRequest::close() {
  if (!has_ended_)
    succeeded(TRITONBACKEND_ResponseFactorySendFlags(factory_, TRITONSERVER_RESPONSE_COMPLETE_FINAL), "final flag");
  succeeded(TRITONBACKEND_ResponseFactoryDelete(factory_), "response factory");
  factory_ = nullptr;
}

void refuse_without_factory(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Response* response;
  const Refusal refusal{TRITONSERVER_ERROR_UNAVAILABLE, "the server cannot take the request now; try again later"};
  if (succeeded(TRITONBACKEND_ResponseNew(&response, request), "response"))
    end_with_error(response, refusal, read_parameters(request).wants_error_code);
}

bool skip_response(FrameReader& body) {
  const uint8_t flags = body.take<uint8_t>();
  if (flags & kError) {
    body.take<uint8_t>();
    for (int i = 0; i < 4; ++i) body.take_bytes(body.take<uint32_t>());
  } else if (flags & kOutputs) {
    for (uint16_t i = 0, count = body.take<uint16_t>(); i < count; ++i) {
      const uint8_t name_size = body.take<uint8_t>();
      if (body.take_bytes(name_size + 1)[name_size] != '\0') throw std::runtime_error("a name has no end");
      body.take<uint8_t>();
      body.take_bytes(body.take<uint8_t>() * sizeof(int64_t));
      body.take_bytes(body.take<uint32_t>());
    }
  }
  return ends_request(flags);
}

Parameters read_parameters(TRITONBACKEND_Request* request) {
  Parameters found;
  uint32_t count = 0, num_clients = 0;
  if (!succeeded(TRITONBACKEND_RequestParameterCount(request, &count), "parameters")) return found;
  for (uint32_t i = 0; i < count; ++i) {
    const char* key;
    TRITONSERVER_ParameterType type;
    const void* value;
    if (!succeeded(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value), "parameter")) continue;
    if (std::strcmp(key, "error_codes") == 0) found.wants_error_code = true;
    if (type != TRITONSERVER_PARAMETER_STRING || std::strcmp(key, kClientHeader) != 0) continue;
    const char* const client = static_cast<const char*>(value);
    found.has_two_clients |= num_clients++ > 0 && found.client != client;
    found.client = client;
  }
  return found;
}

std::string request_frame(uint32_t model, uint64_t handle, TRITONBACKEND_Request* request,
                          const Parameters& parameters) {
  if (parameters.has_two_clients)  // one of them is the client's own, not the proxy's
    throw std::runtime_error(std::string(kClientHeader) + " was sent twice; leave it to the server's proxy");
  FrameWriter frame(ToEngine::kRequest);
  frame.put(model);
  frame.put(handle);
  const char* id;
  require(TRITONBACKEND_RequestId(request, &id), "id");
  frame.put_text(id == nullptr ? "" : id);  // Triton's header allows NULL
  uint32_t count = 0;
  require(TRITONBACKEND_RequestOutputCount(request, &count), "outputs");
  std::string outputs;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    require(TRITONBACKEND_RequestOutputName(request, i, &name), "output");
    outputs.append(name).push_back('\n');
  }
  frame.put_text(outputs);
  require(TRITONBACKEND_RequestInputCount(request, &count), "inputs");
  frame.put(count);
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input;
    require(TRITONBACKEND_RequestInputByIndex(request, i, &input), "input");
    put_input(frame, input);
  }
  frame.put_text(parameters.client);
  return frame.frame();
}

}  // namespace faser
