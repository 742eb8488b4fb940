// The backend `faser`: passes its models' requests to an engine process, and that process's answers to Triton.
#include <time.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine.h"
#include "log.h"
#include "triton_api.h"

namespace {

using faser::Engine;

struct Model {
  std::shared_ptr<Engine> engine;
  uint32_t id = 0;
};

// The engines of this server, one per configuration.
struct Engines {
  std::mutex mutex;
  std::vector<std::shared_ptr<Engine>> engines;
};

Engines& all() {
  static Engines* const found = new Engines;
  return *found;
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);  // Triton's own clock: it subtracts its times from these
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

TRITONSERVER_Error* read_info(TRITONBACKEND_Model* model, faser::ModelInfo* info) {
  const char* text;
  uint64_t version;
  TRITONBACKEND_ArtifactType artifact;
  if (auto* error = TRITONBACKEND_ModelName(model, &text)) return error;
  info->name = text;
  if (auto* error = TRITONBACKEND_ModelVersion(model, &version)) return error;
  info->version = std::to_string(version);
  if (auto* error = TRITONBACKEND_ModelRepository(model, &artifact, &text)) return error;
  info->repository = text;
  TRITONSERVER_Message* config;
  if (auto* error = TRITONBACKEND_ModelConfig(model, 1, &config)) return error;
  size_t size;
  TRITONSERVER_Error* const error = TRITONSERVER_MessageSerializeToJson(config, &text, &size);
  if (error == nullptr) info->config_json.assign(text, size);
  faser::succeeded(TRITONSERVER_MessageDelete(config), "configuration");
  return error;
}

TRITONSERVER_Error* model_of(TRITONBACKEND_ModelInstance* instance, Model** found) {
  TRITONBACKEND_Model* model;
  if (auto* error = TRITONBACKEND_ModelInstanceModel(instance, &model)) return error;
  void* state;
  if (auto* error = TRITONBACKEND_ModelState(model, &state)) return error;
  *found = static_cast<Model*>(state);
  return nullptr;
}

// Removes the engine from the list if no model uses it; the caller ends it.
void drop_unused(Engines& list, const std::shared_ptr<Engine>& engine) {
  if (!engine->has_models())
    list.engines.erase(std::remove(list.engines.begin(), list.engines.end(), engine), list.engines.end());
}

}  // namespace

extern "C" {

FASER_EXPORT TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  uint32_t major, minor;
  if (auto* error = TRITONBACKEND_ApiVersion(&major, &minor)) return error;
  if (major == faser::kApiVersionMajor && minor >= faser::kApiVersionMinor) return nullptr;
  const std::string message = "the backend API of this Triton is version " + std::to_string(major) + "." +
                              std::to_string(minor) + ", the backend faser needs " +
                              std::to_string(faser::kApiVersionMajor) + "." + std::to_string(faser::kApiVersionMinor) +
                              " or a later minor version; use Triton 2.51 or newer";
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, message.c_str());
}

FASER_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* triton_model) {
  faser::ModelInfo info;
  if (auto* error = read_info(triton_model, &info)) return error;
  auto model = std::make_unique<Model>();
  Engines& list = all();
  const std::lock_guard<std::mutex> lock(list.mutex);
  for (size_t i = 0; i <= list.engines.size(); ++i) {
    if (i == list.engines.size()) list.engines.push_back(std::make_shared<Engine>());
    const std::shared_ptr<Engine> engine = list.engines[i];
    const faser::Opened opened = engine->open(info, &model->id);
    if (opened.status == faser::OpenStatus::kOpened) {
      model->engine = engine;
      return TRITONBACKEND_ModelSetState(triton_model, model.release());
    }
    if (opened.status == faser::OpenStatus::kFailed) {
      drop_unused(list, engine);
      return TRITONSERVER_ErrorNew(opened.error.code, opened.error.message.c_str());
    }
  }
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "no engine process takes the model");
}

FASER_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* triton_model) {
  void* state;
  if (auto* error = TRITONBACKEND_ModelState(triton_model, &state)) return error;
  const std::unique_ptr<Model> model(static_cast<Model*>(state));
  if (model == nullptr) return nullptr;
  Engines& list = all();
  const std::lock_guard<std::mutex> lock(list.mutex);
  model->engine->close(model->id);
  drop_unused(list, model->engine);
  return nullptr;
}

// Newer servers call this; Triton 2.51 does not.
FASER_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance) {
  Model* model;
  if (auto* error = model_of(instance, &model)) return error;
  if (model->engine->is_ready()) return nullptr;
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "the engine process does not take requests now");
}

FASER_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                                    TRITONBACKEND_Request** requests, uint32_t count) {
  Model* model;
  if (auto* error = model_of(instance, &model)) return error;
  const uint64_t started_ns = now_ns();
  for (uint32_t i = 0; i < count; ++i) {
    model->engine->submit(model->id, requests[i]);
    const uint64_t ended_ns = now_ns();
    faser::succeeded(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, started_ns, started_ns,
                                                                 ended_ns, ended_ns),
                     "statistics");
    faser::succeeded(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL), "release");
  }
  const uint64_t ended_ns = now_ns();
  faser::succeeded(
      TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, started_ns, started_ns, ended_ns, ended_ns),
      "statistics");
  return nullptr;
}
}
