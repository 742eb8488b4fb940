// A Triton request that no model executes, for code that reads and answers requests by itself.
#ifndef FASER_STUB_REQUEST_H_
#define FASER_STUB_REQUEST_H_

#include <memory>

#include "stub_triton.h"

// The client's side and Triton's; the latter is released at the end, unless the backend did so.
class StubRequest {
 public:
  StubRequest();
  explicit StubRequest(std::shared_ptr<stub::Request> of_client);
  ~StubRequest();
  StubRequest(const StubRequest&) = delete;
  StubRequest& operator=(const StubRequest&) = delete;

  std::shared_ptr<stub::Request> client;
  TRITONBACKEND_Request* request;

 private:
  std::unique_ptr<TRITONBACKEND_Model> model_;
};

#endif  // FASER_STUB_REQUEST_H_
