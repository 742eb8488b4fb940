// Responses from the engine process to one request: as many as the bytes hold, up to the last one.
#include <stdexcept>
#include <string>

#include "input.h"
#include "requests.h"
#include "stub_request.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  StubRequest stubbed;
  stubbed.client->keeps_responses = false;
  const bool wants_code = input.flag();
  const std::string bytes = input.text(size);
  TRITONBACKEND_ResponseFactory* factory;
  fuzz_expect(TRITONBACKEND_ResponseFactoryNew(&factory, stubbed.request) == nullptr, "a factory is made");
  faser::OpenRequest open(0, factory, wants_code);
  faser::FrameReader body(bytes.data(), bytes.data() + bytes.size());
  bool is_final = false;
  try {
    while (!is_final && !body.is_done()) {
      faser::FrameReader response = body;
      is_final = faser::skip_response(body);
      open.answer(response);
      fuzz_expect(response.position() == body.position(), "a response is read as far as it was passed over");
    }
  } catch (const std::runtime_error&) {
  }
  if (!is_final) open.fail({TRITONSERVER_ERROR_UNAVAILABLE, "it stopped"});
  stubbed.client->wait();
  return 0;
}
