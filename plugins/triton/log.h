// Triton's errors and log.
#ifndef FASER_TRITON_LOG_H_
#define FASER_TRITON_LOG_H_

#include <string>

#include "triton_api.h"

namespace faser {

inline void log_error(const std::string& message) {
  TRITONSERVER_Error* error =
      TRITONSERVER_LogMessage(TRITONSERVER_LOG_ERROR, "faser", 0, ("faser: " + message).c_str());
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

// Returns true if a call succeeded; otherwise logs and deletes its error.
inline bool succeeded(TRITONSERVER_Error* error, const char* what) {
  if (error == nullptr) return true;
  log_error(std::string(what) + ": " + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  return false;
}

}  // namespace faser

#endif  // FASER_TRITON_LOG_H_
