// Triton's errors, and its log.
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

// True if a call went well; else its error is logged and deleted.
inline bool succeeded(TRITONSERVER_Error* error, const char* what) {
  if (error == nullptr) return true;
  log_error(std::string(what) + ": " + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  return false;
}

}  // namespace faser

#endif  // FASER_TRITON_LOG_H_
