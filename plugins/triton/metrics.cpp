#include "metrics.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "log.h"

namespace faser {
namespace {

constexpr char kReadyFamily[] = "faser_engine_ready";
constexpr char kFailureFamily[] = "faser_request_failures_total";

using Labels = std::map<std::string, std::string>;

// All series of the server by family and labels. Never deleted: Triton would drop them from /metrics.
struct Registry {
  std::mutex mutex;
  std::map<std::string, TRITONSERVER_MetricFamily*> families;
  std::map<std::pair<std::string, Labels>, TRITONSERVER_Metric*> metrics;
};

Registry& registry() {
  static Registry* const found = new Registry;
  return *found;
}

TRITONSERVER_Metric* new_metric(TRITONSERVER_MetricFamily* family, const Labels& labels,
                                const std::vector<double>& buckets) {
  TRITONSERVER_MetricArgs* args = nullptr;
  if (!buckets.empty()) {
    if (!succeeded(TRITONSERVER_MetricArgsNew(&args), "metric arguments")) return nullptr;
    succeeded(TRITONSERVER_MetricArgsSetHistogram(args, buckets.data(), buckets.size()), "histogram buckets");
  }
  std::vector<const TRITONSERVER_Parameter*> parameters;
  for (const auto& [name, value] : labels)
    parameters.push_back(TRITONSERVER_ParameterNew(name.c_str(), TRITONSERVER_PARAMETER_STRING, value.c_str()));
  TRITONSERVER_Metric* metric = nullptr;
  succeeded(TRITONSERVER_MetricNewWithArgs(&metric, family, parameters.data(), parameters.size(), args), "metric");
  for (const TRITONSERVER_Parameter* parameter : parameters)
    TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  if (args != nullptr) succeeded(TRITONSERVER_MetricArgsDelete(args), "metric arguments");
  return metric;
}

}  // namespace

void Metrics::apply(FrameReader& body) {
  while (!body.is_done()) {
    const MetricOp op = static_cast<MetricOp>(body.take<uint8_t>());
    if (op == MetricOp::kDeclare) {
      declare(body);
      continue;
    }
    const uint32_t id = body.take<uint32_t>();
    const double value = body.take<double>();
    const auto found = series_.find(id);
    if (found == series_.end() || found->second.metric == nullptr || found->second.is_ready_gauge) continue;
    TRITONSERVER_Metric* const metric = found->second.metric;
    if (op == MetricOp::kAdd)
      succeeded(TRITONSERVER_MetricIncrement(metric, value), "metric");
    else if (op == MetricOp::kSet)
      succeeded(TRITONSERVER_MetricSet(metric, value), "metric");
    else if (op == MetricOp::kObserve)
      succeeded(TRITONSERVER_MetricObserve(metric, value), "metric");
    else
      throw std::runtime_error("an unknown change of a metric");
  }
}

void Metrics::declare(FrameReader& body) {
  const uint32_t id = body.take<uint32_t>();
  const auto kind = static_cast<TRITONSERVER_MetricKind>(body.take<uint8_t>());
  const std::string name = body.take_text(), help = body.take_text();
  Labels labels;
  for (uint32_t i = 0, count = body.take<uint32_t>(); i < count; ++i) {
    std::string label = body.take_text();
    labels[std::move(label)] = body.take_text();
  }
  std::vector<double> buckets;
  for (uint32_t i = 0, count = body.take<uint32_t>(); i < count; ++i) buckets.push_back(body.take<double>());

  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  TRITONSERVER_MetricFamily*& family = all.families[name];
  if (family == nullptr) succeeded(TRITONSERVER_MetricFamilyNew(&family, kind, name.c_str(), help.c_str()), "metric");
  if (family == nullptr) return;
  TRITONSERVER_Metric*& metric = all.metrics[{name, labels}];
  if (metric == nullptr) metric = new_metric(family, labels, buckets);
  series_[id] = {metric, kind, name == kReadyFamily};
  if (name == kReadyFamily && metric != nullptr)
    succeeded(TRITONSERVER_MetricSet(metric, is_ready_ ? 1.0 : 0.0), "metric");
}

void Metrics::rest() {
  for (const auto& [id, series] : series_)
    if (series.kind == TRITONSERVER_METRIC_KIND_GAUGE && series.metric != nullptr)
      succeeded(TRITONSERVER_MetricSet(series.metric, 0.0), "metric");
  series_.clear();
  is_ready_ = false;
}

void Metrics::set_ready(bool is_ready) {
  if (is_ready_ == is_ready) return;
  is_ready_ = is_ready;
  for (const auto& [id, series] : series_)
    if (series.is_ready_gauge && series.metric != nullptr)
      succeeded(TRITONSERVER_MetricSet(series.metric, is_ready ? 1.0 : 0.0), "metric");
}

void Metrics::count_failure(const std::string& model, const std::string& version, const char* code) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.metrics.find({kFailureFamily, Labels{{"model", model}, {"version", version}, {"code", code}}});
  if (found != all.metrics.end() && found->second != nullptr)
    succeeded(TRITONSERVER_MetricIncrement(found->second, 1.0), "metric");
}

}  // namespace faser
