// What the device counted, as JSON; the log of calls; and the way the bindings find the calls.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "driver.h"

namespace virtual_gpu {

namespace {

struct Copies {
  uint64_t count = 0, bytes = 0;
};

struct Counters {
  std::map<std::string, std::map<std::string, uint64_t>> work;  // by context and label
  std::map<std::string, uint64_t> waits, graphs;                // by label, by context
  std::map<std::string, std::map<std::string, Copies>> copies;  // by direction and label
};

Counters& counters() {
  static Counters* made = new Counters;
  return *made;
}

thread_local std::string next_label;

std::string context_of(const Stream* stream) {
  const Green* green = stream->green;
  return green == nullptr ? "whole" : std::to_string(green->first) + "+" + std::to_string(green->count);
}

std::string number(uint64_t value) { return std::to_string(value); }
std::string number(const Copies& copies) {
  return "{\"count\": " + number(copies.count) + ", \"bytes\": " + number(copies.bytes) + "}";
}

template <typename T>
std::string number(const std::map<std::string, T>& items) {  // labels hold no quotes
  std::string all = "{";
  for (const auto& [name, value] : items) all += (all.size() > 1 ? ", \"" : "\"") + name + "\": " + number(value);
  return all + "}";
}

bool is_named(const char* variable, const char* name) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, name) == 0;
}

void* find(const char* name) {
  if (is_named("LIBCUDA_LACKS", name)) return nullptr;
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&counters), &info);
  static void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return dlsym(library, name);
}

}  // namespace

std::string Label::take(const char* otherwise) {
  std::string label = next_label.empty() ? otherwise : next_label;
  next_label.clear();
  return label;
}

void count_work(const Stream* stream, const std::string& label) { counters().work[context_of(stream)][label]++; }
void count_wait(const std::string& label) { counters().waits[label]++; }
void count_graph(const Stream* stream) { counters().graphs[context_of(stream)]++; }
void count_copy(const char* direction, size_t bytes, const std::string& label) {
  Copies& copies = counters().copies[direction][label];
  copies.count++;
  copies.bytes += bytes;
}

void say(const std::string& line) { std::fprintf(stderr, "virtual GPU: %s\n", line.c_str()); }

Status logged(const char* name, const char* note) {
  if (const char* path = std::getenv("LIBCUDA_LOG")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s%s\n", name, note);
      std::fclose(file);
    }
  }
  return is_named("LIBCUDA_FAILS", name) ? kNotSupported : kDone;
}

bool fails_now(const char* name) {
  static std::map<std::string, uint64_t> calls;
  static const char* rule = std::getenv("VIRTUAL_GPU_FAILS");
  return rule != nullptr && rule == name + (":" + number(++calls[name]));
}

}  // namespace virtual_gpu

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

CALL(cuGetProcAddress_v2, const char* name, void** function, int, uint64_t, int* status) {
  *function = find(name);
  if (status != nullptr) *status = *function == nullptr;
  return *function == nullptr ? kNotFound : kDone;
}
CALL(cuGetProcAddress, const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}

// The name of the calling thread's next copy or wait.
CALL(virtual_gpu_label, const char* label) {
  next_label = label;
  return kDone;
}
CALL(virtual_gpu_is_live, uintptr_t address, size_t size, const char* user) {
  return is_live(address, size, user) ? kDone : kIllegalAddress;
}
CALL(virtual_gpu_seed, uint64_t seed) {
  Lock lock(device().mutex);
  device().random.seed(seed);
  return kDone;
}
// Every later item and call fails with a launch failure: a host function could not do its work.
CALL(virtual_gpu_fail) {
  Lock lock(device().mutex);
  return device().failure = kLaunchFailed;
}
// The counters as JSON, valid until the thread's next call.
extern "C" __attribute__((visibility("default"))) const char* virtual_gpu_counters() {
  thread_local std::string text;
  Lock lock(device().mutex);
  const Counters& all = counters();
  std::ostringstream out;
  out << "{\"work\": " << number(all.work) << ", \"waits\": " << number(all.waits)
      << ", \"graphs\": " << number(all.graphs) << ", \"copies\": " << number(all.copies)
      << ", \"device_bytes\": " << bytes_in_use(true) << ", \"host_bytes\": " << bytes_in_use(false) << "}";
  text = out.str();
  return text.c_str();
}
