// The metrics that engine processes publish through this backend.
#ifndef FASER_TRITON_METRICS_H_
#define FASER_TRITON_METRICS_H_

#include <cstdint>
#include <string>
#include <unordered_map>

#include "triton_api.h"
#include "wire.h"

namespace faser {

// The metrics of one engine, used by its thread. A series outlives the engine process and the model that declared it,
// so counters continue.
class Metrics {
 public:
  // Applies a kMetrics body: declarations and changes.
  void apply(FrameReader& body);
  // Sets gauges to 0 and forgets the numbers of series, after the engine process ended.
  void rest();
  // Publishes whether requests would be served now.
  void set_ready(bool is_ready);
  // Counts a request that failed without the engine process. Any thread may call it.
  static void count_failure(const std::string& model, const std::string& version, const char* code);

 private:
  struct Series {
    TRITONSERVER_Metric* metric;
    TRITONSERVER_MetricKind kind;
    bool is_ready_gauge;
  };
  void declare(FrameReader& body);

  std::unordered_map<uint32_t, Series> series_;
  bool is_ready_ = false;
};

}  // namespace faser

#endif  // FASER_TRITON_METRICS_H_
