// Libraries: an image names a library of emulated kernels and their parameters (kernels.py writes it).
#include <dlfcn.h>

#include <sstream>

#include "driver.h"

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

namespace {

constexpr const char* kMagic = "kernels for the virtual GPU";
constexpr size_t kMaxParameters = 32;

using Launch = void (*)(void*, const unsigned*, const unsigned*, const uint64_t*, unsigned);

struct Kernel {
  std::string name, parameters;  // one letter each: p a pointer, i an int, h a condition's handle
  void* entry;
  Launch launch;
};

struct Library {
  void* code;
  std::map<std::string, Kernel> kernels;
};

bool fits(const unsigned grid[3], const unsigned block[3]) {
  for (int i = 0; i < 3; i++) {
    if (grid[i] == 0 || block[i] == 0) return false;
  }
  return grid[1] < 65536 && grid[2] < 65536 && block[2] <= 64 && uint64_t{block[0]} * block[1] * block[2] <= 1024;
}

}  // namespace

CALL(cuLibraryLoadData, void** handle, const char* image, void*, void**, unsigned num_jit_options, void*, void**,
     unsigned num_options) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  if (num_jit_options != 0 || num_options != 0) return kInvalidValue;
  std::istringstream lines(image);
  std::string line;
  if (!std::getline(lines, line) || line != kMagic) return kInvalidImage;
  std::getline(lines, line);
  auto made = std::make_unique<Library>();
  made->code = dlopen(line.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (made->code == nullptr) {
    say(dlerror());
    return kInvalidImage;
  }
  const auto launch = reinterpret_cast<Launch>(dlsym(made->code, "emulator_launch"));
  std::string name, parameters;
  while (lines >> name >> parameters) {
    void* entry = dlsym(made->code, name.c_str());
    if (entry == nullptr || launch == nullptr || parameters.size() > kMaxParameters) return kInvalidImage;
    made->kernels[name] = {name, parameters, entry, launch};
  }
  *handle = made.release();
  device().handles.insert(*handle);
  return kDone;
}
CALL(cuLibraryUnload, void* handle) {
  Lock lock(device().mutex);
  if (device().handles.erase(handle) == 0) return kInvalidHandle;
  delete static_cast<Library*>(handle);  // its code stays loaded
  return kDone;
}
CALL(cuLibraryGetKernel, void** function, void* handle, const char* name) {
  Lock lock(device().mutex);
  if (!is_handle(handle)) return kInvalidHandle;
  auto& kernels = static_cast<Library*>(handle)->kernels;
  auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  *function = new Kernel(found->second);  // lives as long as the process, as launches may
  return kDone;
}
CALL(cuLaunchKernel, void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
     unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** parameters, void** extra) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  const Kernel* kernel = static_cast<Kernel*>(function);
  const std::vector<unsigned> grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  if (!fits(grid.data(), block.data()) || extra != nullptr || shared_bytes != 0) return kInvalidValue;
  std::vector<uint64_t> arguments(kMaxParameters, 0);  // taken now: the caller's memory may change
  for (size_t i = 0; i < kernel->parameters.size(); i++) {
    arguments[i] = kernel->parameters[i] == 'i' ? *static_cast<const uint32_t*>(parameters[i])
                                                : *static_cast<const uint64_t*>(parameters[i]);
  }
  const auto run = [kernel, grid, block, arguments] {
    const auto each_pointer = [&](auto check) {
      for (size_t i = 0; i < kernel->parameters.size(); i++) {
        if (kernel->parameters[i] == 'p' && arguments[i] != 0 && !check(arguments[i])) return false;
      }
      return true;
    };
    if (!each_pointer([&](uint64_t address) { return is_live(address, 1, kernel->name); })) return kIllegalAddress;
    unsigned order = 0;  // of a block's threads
    {
      Lock lock(device().mutex);
      order = static_cast<unsigned>(device().random());
    }
    kernel->launch(kernel->entry, grid.data(), block.data(), arguments.data(), order);
    const auto is_intact = [&](uint64_t address) { return is_border_intact(address, kernel->name); };
    return each_pointer(is_intact) ? kDone : kIllegalAddress;
  };
  return enqueue(stream, {"kernel " + kernel->name, run});
}
