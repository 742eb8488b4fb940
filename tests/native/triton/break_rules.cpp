// Breaks one of Triton's rules that the backend must keep: the stub has to end the process.
//
//   break_rules RULE
#include <cstdio>
#include <string>

#include "stub_request.h"

int main(int argc, char** argv) {
  const std::string rule = argc > 1 ? argv[1] : "";
  auto client = std::make_shared<stub::Request>();
  client->inputs.push_back({"x", 2, {1}, {"a"}});
  auto* const stubbed = new StubRequest(client);
  TRITONBACKEND_ResponseFactory* factory;
  TRITONBACKEND_ResponseFactoryNew(&factory, stubbed->request);
  const auto new_response = [&] {
    TRITONBACKEND_Response* response;
    TRITONBACKEND_ResponseNewFromFactory(&response, factory);
    return response;
  };
  TRITONSERVER_Error* const error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "an error");
  TRITONBACKEND_Response* const response = new_response();
  if (rule == "a factory is deleted before the final flag") {
    TRITONBACKEND_ResponseDelete(response);
    TRITONBACKEND_ResponseFactoryDelete(factory);
  } else if (rule == "two final flags") {
    TRITONBACKEND_ResponseFactorySendFlags(factory, 1);
    TRITONBACKEND_ResponseFactorySendFlags(factory, 1);
  } else if (rule == "a response after the final one") {
    TRITONBACKEND_ResponseSend(response, 1, nullptr);
    TRITONBACKEND_ResponseSend(new_response(), 0, nullptr);
  } else if (rule == "an output without a buffer") {
    TRITONBACKEND_Output* output;
    TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INVALID, nullptr, 0);
    TRITONBACKEND_ResponseSend(response, 1, nullptr);
  } else if (rule == "more than the buffer") {
    TRITONBACKEND_Output* output;
    TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INVALID, nullptr, 0);
    void* buffer;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    TRITONBACKEND_OutputBuffer(output, &buffer, 3, &memory, &memory_id);
    for (volatile int i = 0; i < 4; i = i + 1) static_cast<char*>(buffer)[i] = 'a';
  } else if (rule == "a response sent twice") {
    TRITONBACKEND_ResponseSend(response, 0, nullptr);
    TRITONBACKEND_ResponseSend(response, 0, nullptr);
  } else if (rule == "an error deleted twice") {
    TRITONSERVER_ErrorDelete(error);
    TRITONSERVER_ErrorDelete(error);
  } else if (rule == "a request that nobody can answer") {
    StubRequest other;
    TRITONBACKEND_RequestRelease(other.request, TRITONSERVER_REQUEST_RELEASE_ALL);
  } else if (rule == "an input that is not there") {
    TRITONBACKEND_Input* input;
    TRITONBACKEND_RequestInputByIndex(stubbed->request, 1, &input);
  } else if (rule == "something that is left") {
    TRITONBACKEND_ResponseSend(response, 1, nullptr);
    delete stubbed;
  } else {
    std::puts("no such rule");
  }
  return 0;
}
