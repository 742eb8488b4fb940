// Stands in for libcuda.so.1 so that cuda-python's real bindings can be called without a GPU: memory is the host's,
// work is done at once, and every call is logged to $LIBCUDA_LOG. What a GPU does is not imitated.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kOutOfMemory = 2;

int log_call(const char* name) {
  if (const char* path = std::getenv("LIBCUDA_LOG")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\n", name);
      std::fclose(file);
    }
  }
  return 0;
}

void* find(const char* name) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&log_call), &info);
  static void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return dlsym(library, name);
}

}  // namespace

#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
#define LOG log_call(__func__)

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
CALL(cuDeviceGetAttribute, int* value, int attribute, int) { return *value = attribute == 75 ? 8 : 9, 0; }
CALL(cuDevicePrimaryCtxRetain, void** context, int) { return *context = reinterpret_cast<void*>(0x1000), LOG; }
CALL(cuDevicePrimaryCtxRelease, int) { return LOG; }
CALL(cuCtxSetCurrent, void* context) { return context == reinterpret_cast<void*>(0x1000) ? 0 : 201; }
CALL(cuCtxGetCurrent, void** context) { return *context = reinterpret_cast<void*>(0x1000), 0; }
CALL(cuCtxSynchronize) { return LOG; }
CALL(cuStreamCreate, void** stream, unsigned flags) {
  *stream = reinterpret_cast<void*>(0x2000);
  return flags == 1 ? LOG : 1;
}
CALL(cuStreamDestroy, void* stream) { return stream == reinterpret_cast<void*>(0x2000) ? LOG : 400; }
CALL(cuStreamSynchronize, void* stream) { return stream == reinterpret_cast<void*>(0x2000) ? LOG : 400; }
CALL(cuMemAlloc, uint64_t* address, size_t size) {
  if (size > (size_t{1} << 30)) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  std::memset(memory, 0xff, size);
  *address = reinterpret_cast<uint64_t>(memory);
  return LOG;
}
CALL(cuMemFree, uint64_t address) {
  std::free(reinterpret_cast<void*>(address));
  return LOG;
}
CALL(cuMemHostAlloc, void** address, size_t size, unsigned) { return *address = std::malloc(size), LOG; }
CALL(cuMemFreeHost, void* address) {
  std::free(address);
  return LOG;
}
CALL(cuMemsetD8, uint64_t address, unsigned char value, size_t size) {
  std::memset(reinterpret_cast<void*>(address), value, size);
  return LOG;
}
CALL(cuMemsetD8Async, uint64_t address, unsigned char value, size_t size, void*) {
  return cuMemsetD8(address, value, size);
}
CALL(cuMemcpyHtoDAsync, uint64_t target, const void* source, size_t size, void*) {
  std::memcpy(reinterpret_cast<void*>(target), source, size);
  return LOG;
}
CALL(cuMemcpyDtoHAsync, void* target, uint64_t source, size_t size, void*) {
  std::memcpy(target, reinterpret_cast<void*>(source), size);
  return LOG;
}
CALL(cuMemcpyDtoDAsync, uint64_t target, uint64_t source, size_t size, void*) {
  std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), size);
  return LOG;
}
CALL(cuStreamBeginCapture, void*, int mode) { return mode == 1 ? LOG : 1; }
CALL(cuStreamEndCapture, void*, void** graph) { return *graph = reinterpret_cast<void*>(0x3000), LOG; }
CALL(cuGraphInstantiateWithFlags, void** executable, void* graph, uint64_t) {
  *executable = reinterpret_cast<void*>(0x4000);
  return graph == reinterpret_cast<void*>(0x3000) ? LOG : 400;
}
CALL(cuGraphInstantiate, void** executable, void* graph, uint64_t flags) {
  return cuGraphInstantiateWithFlags(executable, graph, flags);
}
CALL(cuGraphDestroy, void* graph) { return graph == reinterpret_cast<void*>(0x3000) ? LOG : 400; }
CALL(cuGraphLaunch, void* executable, void*) { return executable == reinterpret_cast<void*>(0x4000) ? LOG : 400; }
CALL(cuGraphExecDestroy, void* executable) { return executable == reinterpret_cast<void*>(0x4000) ? LOG : 400; }
