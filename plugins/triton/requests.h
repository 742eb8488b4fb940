// Reads Triton's requests into frames, and answers them from frames.
#ifndef FASER_TRITON_REQUESTS_H_
#define FASER_TRITON_REQUESTS_H_

#include <cstdint>
#include <string>

#include "triton_api.h"
#include "wire.h"

namespace faser {

// An error for one client. field, value and limit are texts, empty if the error is not about a field.
struct Refusal {
  TRITONSERVER_Error_Code code;
  std::string message;
  std::string field = "", value = "", limit = "";
};

// A request whose FINAL flag has not been sent; end it with fail() or a final response.
class OpenRequest {
 public:
  OpenRequest(uint32_t model, TRITONBACKEND_ResponseFactory* factory, bool wants_code)
      : model_(model), factory_(factory), wants_code_(wants_code) {}

  uint32_t model() const { return model_; }
  // Returns true if the client has cancelled, until note_cancelled() is called.
  bool was_cancelled();
  void note_cancelled() { is_noted_ = true; }
  // Sends the next response in the body.
  void answer(FrameReader& body);
  // Ends the request with an error.
  void fail(const Refusal& refusal);

  bool is_large = false;    // one of its responses was large, so later ones are sent by the same thread
  bool is_dropped = false;  // it ended with an error here, but its last response has not arrived

 private:
  void send_outputs(FrameReader& body, bool is_final);
  void send_error(const Refusal& refusal);
  void close();

  uint32_t model_ = 0;
  TRITONBACKEND_ResponseFactory* factory_ = nullptr;
  bool wants_code_ = false;
  bool is_noted_ = false, has_ended_ = false;  // has_ended_: the final flag has been sent
};

// Ends a request that has no response factory, with an error.
void refuse_without_factory(TRITONBACKEND_Request* request);

// Skips the next response in the body; returns true if it is a request's last one.
bool skip_response(FrameReader& body);

// The request parameters that the backend reads. wants_error_code: error_codes was sent, so errors are JSON with the
// fields of a Refusal. client: the value of kClientHeader, which a proxy sets. has_two_clients: the header was set
// twice, to different values.
struct Parameters {
  bool wants_error_code = false, has_two_clients = false;
  std::string client;
};
Parameters read_parameters(TRITONBACKEND_Request* request);

// Builds a kRequest frame. Throws std::runtime_error, with a text for the client, if an input cannot be read.
std::string request_frame(uint32_t model, uint64_t handle, TRITONBACKEND_Request* request,
                          const Parameters& parameters);

}  // namespace faser

#endif  // FASER_TRITON_REQUESTS_H_
