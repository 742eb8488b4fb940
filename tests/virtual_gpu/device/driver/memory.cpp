// Device and page-locked memory: host memory with borders that are checked, poisoned when it is new and when it is
// gone.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace virtual_gpu {

namespace {

constexpr size_t kBorder = 256, kAlignment = 256;
constexpr int kBorderByte = 0xA5;
// As floats of any width NaN, as integers -1 and a negative number.
constexpr int kNewByte = 0xFF, kGoneByte = 0xFE;
// What is gone stays this long: who still reads it gets poison and not another's numbers.
constexpr size_t kQuarantineBytes = 32 << 20;

struct Block {
  size_t size;
  bool is_device;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Block> live;
  std::deque<std::pair<uintptr_t, size_t>> gone;
  size_t gone_bytes = 0, in_use[2] = {0, 0};
};

Memory& memory() {
  static Memory* made = new Memory;
  return *made;
}

unsigned char* bytes(uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

std::map<uintptr_t, Block>::iterator block_of(uintptr_t address) {
  auto& live = memory().live;
  auto next = live.upper_bound(address);
  if (next == live.begin()) return live.end();
  auto found = std::prev(next);
  return address < found->first + found->second.size ? found : live.end();
}

bool is_filled(const unsigned char* begin, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (begin[i] != kBorderByte) return false;
  }
  return true;
}

bool has_borders(uintptr_t address, size_t size) {
  return is_filled(bytes(address) - kBorder, kBorder) && is_filled(bytes(address) + size, kBorder);
}

std::string text(const char* format, uintptr_t address, size_t size) {
  char line[160];
  std::snprintf(line, sizeof line, format, reinterpret_cast<void*>(address), size);
  return line;
}

}  // namespace

size_t total_bytes() {
  const char* mebibytes = std::getenv("VIRTUAL_GPU_MEMORY_MIB");
  return static_cast<size_t>(mebibytes == nullptr ? 1024 : std::atoi(mebibytes)) << 20;
}

size_t bytes_in_use(bool is_device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().in_use[is_device];
}

Status allocate(uintptr_t* address, size_t size, bool is_device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (size == 0) return kInvalidValue;
  if (is_device && memory().in_use[1] + size > total_bytes()) return kOutOfMemory;
  const size_t whole = (kBorder + size + kBorder + kAlignment - 1) / kAlignment * kAlignment;
  void* base = std::aligned_alloc(kAlignment, whole);
  if (base == nullptr) return kOutOfMemory;
  *address = reinterpret_cast<uintptr_t>(base) + kBorder;
  std::memset(base, kBorderByte, kBorder);
  std::memset(bytes(*address), is_device ? kNewByte : 0, size);
  std::memset(bytes(*address) + size, kBorderByte, whole - kBorder - size);
  memory().live[*address] = {size, is_device};
  memory().in_use[is_device] += size;
  return kDone;
}

Status release(uintptr_t address) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.live.find(address);
  if (found == all.live.end()) return kInvalidValue;
  const Block block = found->second;
  const bool is_intact = has_borders(address, block.size);
  if (!is_intact) say(text("something was written beside the block at %p of %zu bytes", address, block.size));
  std::memset(bytes(address), kGoneByte, block.size);
  all.live.erase(found);
  all.in_use[block.is_device] -= block.size;
  all.gone.emplace_back(address, block.size);
  all.gone_bytes += block.size;
  while (all.gone_bytes > kQuarantineBytes) {
    std::free(bytes(all.gone.front().first) - kBorder);
    all.gone_bytes -= all.gone.front().second;
    all.gone.pop_front();
  }
  return is_intact ? kDone : kIllegalAddress;
}

bool is_live(uintptr_t address, size_t size, const std::string& user) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = block_of(address);
  if (found != memory().live.end() && address + size <= found->first + found->second.size) return true;
  say(user + text(" uses %p, %zu bytes, which are not allocated", address, size));
  return false;
}

bool is_page_locked(uintptr_t address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = block_of(address);
  return found != memory().live.end() && !found->second.is_device;
}

bool is_border_intact(uintptr_t address, const std::string& user) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = block_of(address);
  if (found == memory().live.end() || has_borders(found->first, found->second.size)) return true;
  say(user + text(" wrote beside the block at %p of %zu bytes", found->first, found->second.size));
  return false;
}

}  // namespace virtual_gpu

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

namespace {

struct Transfer {
  uintptr_t target, source;
  size_t size;
  bool from_device, to_device;
};

const char* direction(const Transfer& transfer) {
  return transfer.from_device ? transfer.to_device ? "DtoD" : "DtoH" : "HtoD";
}

// Queues a copy. Memory that is not page-locked is copied out at once, as CUDA stages it, and read into while the host
// waits.
Status copy(Transfer transfer, void* handle, bool waits) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (transfer.size == 0) return kDone;
  const std::string label = Label::take("copy");
  const uintptr_t on_host = !transfer.from_device ? transfer.source : !transfer.to_device ? transfer.target : 0;
  std::shared_ptr<std::vector<unsigned char>> staged;
  const bool is_locked = on_host != 0 && is_page_locked(on_host);
  if (on_host != 0 && !is_locked) {
    if (Status refused = refuse_while_capturing("a copy of memory that is not page-locked")) return refused;
    if (transfer.from_device) {
      waits = true;
    } else {
      staged = std::make_shared<std::vector<unsigned char>>(bytes(on_host), bytes(on_host) + transfer.size);
      transfer.source = reinterpret_cast<uintptr_t>(staged->data());
    }
  }
  if (waits) {
    if (Status refused = refuse_while_capturing("a copy that waits")) return refused;
  }
  const auto run = [transfer, staged, label, on_host, is_locked] {
    const bool is_fine = (!is_locked || is_live(on_host, transfer.size, label)) &&
                         (!transfer.from_device || is_live(transfer.source, transfer.size, label)) &&
                         (!transfer.to_device || is_live(transfer.target, transfer.size, label));
    if (!is_fine) return kIllegalAddress;
    std::memmove(bytes(transfer.target), bytes(transfer.source), transfer.size);
    Lock lock(device().mutex);
    count_copy(direction(transfer), transfer.size, label);
    return kDone;
  };
  if (Status status = enqueue(stream, {std::string("copy ") + direction(transfer), run})) return status;
  if (!waits) return kDone;
  count_wait(label);
  const uint64_t last = stream->num_enqueued;
  return run_until(lock, [stream, last] { return stream->num_done >= last; });
}

}  // namespace

CALL(cuMemGetInfo, size_t* free, size_t* total) {
  *total = total_bytes();
  *free = *total - bytes_in_use(true);
  return kDone;
}
CALL(cuMemAlloc, uintptr_t* address, size_t size) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  return allocate(address, size, true);
}
CALL(cuMemFree, uintptr_t address) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  const Status status = run_until(lock, [] {  // it waits for the device
    bool all = device().null_stream.queue.empty();
    for (Stream* stream : device().streams) all = all && stream->queue.empty();
    return all;
  });
  return status == kDone ? release(address) : status;
}
// Nodes that allocate do not exist here.
CALL(cuMemAllocAsync, uintptr_t* address, size_t size, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (stream->capture != nullptr) return kCaptureUnsupported;
  return fails_now(__func__) ? kOutOfMemory : allocate(address, size, true);
}
CALL(cuMemsetD8Async, uintptr_t address, unsigned char value, size_t size, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  return enqueue(stream, {"memset", [address, value, size] {
                            if (!is_live(address, size, "memset")) return kIllegalAddress;
                            std::memset(bytes(address), value, size);
                            return kDone;
                          }});
}
CALL(cuMemFreeAsync, uintptr_t address, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (stream->capture != nullptr) return kCaptureUnsupported;
  return enqueue(stream, {"free", [address] { return release(address); }});
}
CALL(cuMemHostAlloc, uintptr_t* address, size_t size, unsigned) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  return allocate(address, size, false);
}
CALL(cuMemFreeHost, uintptr_t address) { return release(address); }
CALL(cuMemcpyHtoDAsync, uintptr_t target, void* source, size_t size, void* stream) {
  return copy({target, reinterpret_cast<uintptr_t>(source), size, false, true}, stream, false);
}
CALL(cuMemcpyDtoHAsync, void* target, uintptr_t source, size_t size, void* stream) {
  return copy({reinterpret_cast<uintptr_t>(target), source, size, true, false}, stream, false);
}
CALL(cuMemcpyDtoDAsync, uintptr_t target, uintptr_t source, size_t size, void* stream) {
  return copy({target, source, size, true, true}, stream, false);
}
CALL(cuMemcpyHtoD, uintptr_t target, void* source, size_t size) {
  return copy({target, reinterpret_cast<uintptr_t>(source), size, false, true}, nullptr, true);
}
CALL(cuMemcpyDtoH, void* target, uintptr_t source, size_t size) {
  return copy({reinterpret_cast<uintptr_t>(target), source, size, true, false}, nullptr, true);
}
