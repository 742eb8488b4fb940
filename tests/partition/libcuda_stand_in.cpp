// Stands in for libcuda.so.1 so that green contexts are made through cuda-python's real bindings without a GPU. SM
// counts follow the documented rounding (132 SMs, groups of 8), handles are checked, every call is logged to
// $LIBCUDA_LOG. $LIBCUDA_FAILS names a call that answers CUDA_ERROR_NOT_SUPPORTED; $LIBCUDA_LACKS one that this driver
// does not have.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotSupported = 801;
constexpr int kSmType = 1;

struct Sms {
  uint32_t count, min_partition, alignment, flags;
};
struct Resource {  // CUdevResource of CUDA 13.0
  int32_t type;
  char internal[92];
  Sms sm;
  char more[32];
};
static_assert(sizeof(Resource) == 144, "the layout that the bindings were built for");
struct Green {
  uint32_t count;
};
struct Stream {
  Green* green;
};

std::set<void*> live;

bool is(const char* variable, const char* name) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, name) == 0;
}

int done(const char* name, const char* note = "") {
  if (const char* path = std::getenv("LIBCUDA_LOG")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s%s\n", name, note);
      std::fclose(file);
    }
  }
  return is("LIBCUDA_FAILS", name) ? kNotSupported : 0;
}

void fill(Resource* resource, uint32_t count) {
  std::memset(resource, 0, sizeof *resource);
  resource->type = count > 0 ? kSmType : 0;
  resource->sm = {count, 8, 8, 0};
}

template <typename T>
void* keep(T value) {
  void* made = new T(value);
  live.insert(made);
  return made;
}

void* find(const char* name) {
  if (is("LIBCUDA_LACKS", name)) return nullptr;
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&keep<Green>), &info);
  static void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return dlsym(library, name);
}

}  // namespace

#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
#define DONE done(__func__)

CALL(cuGetProcAddress_v2, const char* name, void** function, int, uint64_t, int* status) {
  *function = find(name);
  if (status != nullptr) *status = *function == nullptr;
  return *function == nullptr ? 500 : 0;
}
CALL(cuGetProcAddress, const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}
CALL(cuInit, unsigned) { return 0; }
CALL(cuDriverGetVersion, int* version) { return *version = 13000, 0; }
CALL(cuDeviceGet, int* device, int ordinal) { return *device = ordinal, 0; }
CALL(cuDeviceGetAttribute, int* value, int attribute, int) { return *value = attribute == 16 ? 132 : 9, 0; }
CALL(cuCtxGetCurrent, void** context) { return *context = reinterpret_cast<void*>(0x1000), 0; }
CALL(cuCtxGetStreamPriorityRange, int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
CALL(cuStreamCreate, void** stream, unsigned flags) {
  *stream = keep(Stream{nullptr});
  return flags == 1 ? DONE : kInvalidValue;
}
CALL(cuStreamCreateWithPriority, void** stream, unsigned flags, int priority) {
  *stream = keep(Stream{nullptr});
  return flags == 1 ? done(__func__, priority == -5 ? " first" : priority == 0 ? " last" : " wrong") : kInvalidValue;
}
CALL(cuStreamDestroy, void* stream) {
  if (live.erase(stream) == 0) return kInvalidHandle;
  // A stream must go before its context.
  Green* green = static_cast<Stream*>(stream)->green;
  return green == nullptr || live.count(green) ? DONE : kInvalidContext;
}
CALL(cuDeviceGetDevResource, int, Resource* resource, int type) {
  fill(resource, 132);
  return type == kSmType ? DONE : kInvalidValue;
}
CALL(cuDevSmResourceSplitByCount, Resource* groups, unsigned* num_groups, const Resource* input, Resource* rest,
     unsigned flags, unsigned min_count) {
  const uint32_t total = input->sm.count, step = flags == 0 ? 8 : 2;
  const uint32_t count = (min_count + step - 1) / step * step;
  if (count == 0 || count > total) return 915;
  if (*num_groups > total / count) *num_groups = total / count;
  for (unsigned i = 0; groups != nullptr && i < *num_groups; ++i) fill(&groups[i], count);
  if (rest != nullptr) fill(rest, total - *num_groups * count);
  return DONE;
}
CALL(cuDevResourceGenerateDesc, void** description, const Resource* resources, unsigned num) {
  if (num != 1 || resources->type != kSmType) return kInvalidValue;
  *description = new uint32_t(resources->sm.count);
  return DONE;
}
CALL(cuGreenCtxCreate, void** green, void* description, int, unsigned flags) {
  *green = keep(Green{*static_cast<uint32_t*>(description)});
  return flags == 1 ? DONE : kInvalidValue;
}
CALL(cuGreenCtxDestroy, void* green) { return live.erase(green) ? DONE : kInvalidHandle; }
CALL(cuGreenCtxStreamCreate, void** stream, void* green, unsigned flags, int) {
  if (!live.count(green) || flags != 1) return kInvalidValue;
  *stream = keep(Stream{static_cast<Green*>(green)});
  return DONE;
}
CALL(cuGreenCtxGetDevResource, void* green, Resource* resource, int type) {
  // Some chips grant less than was asked for.
  const uint32_t asked = static_cast<Green*>(green)->count;
  fill(resource, std::getenv("LIBCUDA_STINGY") != nullptr && asked > 64 ? asked - 2 : asked);
  return live.count(green) && type == kSmType ? DONE : kInvalidValue;
}
