// torch's CachingHostAllocator, which page-locked memory of torch's own (pin_memory=True) comes from: a block that is
// freed records an event on each stream that copied it without the host waiting, and is given back to the driver, where
// torch keeps it for reuse, once they are done. Freeing is a destructor, so a driver that refuses ends the process.
#include <cstdlib>

#include "driver.h"

using namespace virtual_gpu;

extern "C" {
int cuEventCreate(void** event, unsigned flags);
int cuEventRecord(void* event, void* stream);
int cuEventQuery(void* event);
int cuEventDestroy(void* event);
int cuMemHostAlloc(uintptr_t* address, size_t size, unsigned flags);
int cuMemFreeHost(uintptr_t address);
}

namespace {

struct Freed {
  uintptr_t address;
  std::vector<void*> events;
};

struct Allocator {
  std::recursive_mutex mutex;
  std::map<uintptr_t, std::set<void*>> streams;  // by block that is in use
  std::vector<Freed> freed;
};

Allocator& allocator() {
  static Allocator* made = new Allocator;
  return *made;
}

void check(int status) {
  if (status == kDone) return;
  say("torch's free of page-locked memory threw: CUDA error " + std::to_string(status) +
      (status == kContextDestroyed ? ", context is destroyed" : ""));
  std::abort();
}

// Gives back what no stream uses any more.
void process_events() {
  if (!may_wait()) return;
  std::vector<Freed> left;
  for (Freed& block : allocator().freed) {
    while (!block.events.empty() && cuEventQuery(block.events.back()) == kDone) {
      cuEventDestroy(block.events.back());
      block.events.pop_back();
    }
    if (block.events.empty()) {
      cuMemFreeHost(block.address);
    } else {
      left.push_back(block);
    }
  }
  allocator().freed = left;
}

}  // namespace

CALL(virtual_gpu_torch_host_alloc, uintptr_t* address, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(allocator().mutex);
  process_events();
  const int status = cuMemHostAlloc(address, size, 0);
  if (status == kDone) allocator().streams[*address] = {};
  return status;
}
CALL(virtual_gpu_torch_host_used, uintptr_t address, void* stream) {
  std::lock_guard<std::recursive_mutex> lock(allocator().mutex);
  auto found = allocator().streams.find(address);
  if (found != allocator().streams.end()) found->second.insert(stream);
  return kDone;
}
CALL(virtual_gpu_torch_host_free, uintptr_t address) {
  std::lock_guard<std::recursive_mutex> lock(allocator().mutex);
  Freed block{address, {}};
  for (void* stream : allocator().streams[address]) {
    block.events.push_back(nullptr);
    check(cuEventCreate(&block.events.back(), 0));
    check(cuEventRecord(block.events.back(), stream));
  }
  allocator().streams.erase(address);
  allocator().freed.push_back(block);
  process_events();
  return kDone;
}
