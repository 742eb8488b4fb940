// The device's attributes and contexts, and green contexts over its SMs by the documented rounding (groups of 8).
#include <cstdlib>
#include <cstring>

#include "driver.h"

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

namespace {

constexpr int kSmType = 1;
constexpr uint32_t kGroup = 8, kFineGroup = 2;

struct Sms {
  uint32_t count, min_partition, alignment, flags;
};
struct Resource {  // CUdevResource of CUDA 13.0; which SMs they are is in what is internal there
  int32_t type;
  uint32_t first;
  char internal[88];
  Sms sm;
  char more[32];
};
static_assert(sizeof(Resource) == 144, "the layout that the bindings were built for");

void fill(Resource* resource, uint32_t first, uint32_t count) {
  std::memset(resource, 0, sizeof *resource);
  resource->type = count > 0 ? kSmType : 0;
  resource->first = first;
  resource->sm = {count, kGroup, kGroup, 0};
}

}  // namespace

CALL(cuInit, unsigned) { return kDone; }
CALL(cuDriverGetVersion, int* version) { return *version = 13000, kDone; }
CALL(cuDeviceGet, int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? kDone : 101; }
CALL(cuDeviceGetCount, int* count) { return *count = 1, kDone; }
CALL(cuDeviceGetName, char* name, int size, int) {
  std::strncpy(name, "virtual GPU", static_cast<size_t>(size));
  return kDone;
}
CALL(cuDeviceTotalMem, size_t* total, int) { return *total = total_bytes(), kDone; }
// 16: multiprocessors, 75 and 76: compute capability 12.0, which every backend runs on, or of LIBCUDA_MAJOR.
CALL(cuDeviceGetAttribute, int* value, int attribute, int) {
  const char* major = std::getenv("LIBCUDA_MAJOR");
  *value = attribute == 16 ? kNumSms : attribute == 75 ? (major != nullptr ? std::atoi(major) : 12) : 0;
  return attribute == 16 || attribute == 75 || attribute == 76 ? kDone : kNotSupported;
}
CALL(cuCtxGetCurrent, void** context) { return *context = reinterpret_cast<void*>(kPrimaryContext), kDone; }
CALL(cuCtxSetCurrent, void*) { return kDone; }
CALL(cuDevicePrimaryCtxRetain, void** context, int) {
  return *context = reinterpret_cast<void*>(kPrimaryContext), kDone;
}
CALL(cuCtxGetStreamPriorityRange, int* least, int* greatest) { return *least = 0, *greatest = -5, kDone; }

CALL(cuDeviceGetDevResource, int, Resource* resource, int type) {
  fill(resource, 0, kNumSms);
  return type == kSmType ? logged(__func__) : kInvalidValue;
}
CALL(cuDevSmResourceSplitByCount, Resource* groups, unsigned* num_groups, const Resource* input, Resource* rest,
     unsigned flags, unsigned min_count) {
  const uint32_t total = input->sm.count, step = flags == 0 ? kGroup : kFineGroup;
  const uint32_t count = (min_count + step - 1) / step * step;
  if (count == 0 || count > total) return kInvalidConfiguration;
  if (*num_groups > total / count) *num_groups = total / count;
  for (unsigned i = 0; groups != nullptr && i < *num_groups; ++i) fill(&groups[i], input->first + i * count, count);
  if (rest != nullptr) fill(rest, input->first + *num_groups * count, total - *num_groups * count);
  return logged(__func__);
}
CALL(cuDevResourceGenerateDesc, void** description, const Resource* resources, unsigned num) {
  if (num != 1 || resources->type != kSmType) return kInvalidValue;
  *description = new Green{resources->first, resources->sm.count};
  return logged(__func__);
}
CALL(cuGreenCtxCreate, void** green, void* description, int, unsigned flags) {
  Lock lock(device().mutex);
  *green = new Green(*static_cast<Green*>(description));
  device().handles.insert(*green);
  return flags == 1 ? logged(__func__) : kInvalidValue;
}
CALL(cuGreenCtxDestroy, void* green) {
  Lock lock(device().mutex);
  return device().handles.erase(green) ? logged(__func__) : kInvalidHandle;
}
CALL(cuGreenCtxGetDevResource, void* green, Resource* resource, int type) {
  Lock lock(device().mutex);
  if (!is_handle(green) || type != kSmType) return kInvalidValue;
  // Some chips grant less than was asked for.
  const Green& held = *static_cast<Green*>(green);
  fill(resource, held.first, std::getenv("LIBCUDA_STINGY") != nullptr && held.count > 64 ? held.count - 2 : held.count);
  return logged(__func__);
}
