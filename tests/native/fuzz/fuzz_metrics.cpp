// Frames of metrics from the engine process.
#include <stdexcept>

#include "input.h"
#include "metrics.h"
#include "stub_triton.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static faser::Metrics metrics;
  static int num_runs = 0;
  const char* const begin = reinterpret_cast<const char*>(data);
  faser::FrameReader body(begin, begin + size);
  try {
    metrics.apply(body);
  } catch (const std::runtime_error&) {
  }
  metrics.set_ready(size % 2 == 0);
  faser::Metrics::count_failure("m", "1", "UNAVAILABLE");
  if (++num_runs % 16 == 0) metrics.rest();
  fuzz_expect(stub::num_held() == 0, "parameters and arguments of metrics are deleted");
  return 0;
}
