// Frames between this backend and the engine process: the length of the rest (4 bytes), a type and a body. Numbers are
// little endian. The peer is faser_trtllm/serving/engine_process/wire.py.
#ifndef FASER_TRITON_WIRE_H_
#define FASER_TRITON_WIRE_H_

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace faser {

constexpr char kClientHeader[] = "x-faser-client";  // a header of HTTP and gRPC, which Triton makes a parameter
constexpr uint32_t kWireVersion = 3;
constexpr const char* kRelease = "0.2.0";            // release of the package; the engine process must have the same
constexpr uint64_t kMaxFrameBytes = 64ull << 20;     // in a client's request
constexpr uint64_t kMaxAnswerBytes = 512ull << 20;   // in a frame of the engine process
constexpr uint64_t kMaxBacklogBytes = 256ull << 20;  // that the engine process has not read yet
constexpr uint64_t kLargeBytes = 8ull << 10;         // larger responses are sent by another thread
constexpr uint64_t kMaxUnsentBytes = 256ull << 20;   // in large responses that wait for that thread

enum class ToEngine : uint8_t { kHello = 1, kOpen, kClose, kRequest, kCancel, kPing };
enum class FromEngine : uint8_t { kHello = 1, kOpened, kResponses, kPong, kDraining, kMetrics };
enum class OpenStatus : uint8_t { kOpened, kOtherConfiguration, kFailed };
enum class MetricOp : uint8_t { kDeclare = 1, kAdd, kSet, kObserve };
enum ResponseFlag : uint8_t { kFinal = 1, kError = 2, kOutputs = 4 };

// Builds one frame.
class FrameWriter {
 public:
  explicit FrameWriter(ToEngine type) : data_(4, '\0') { put(static_cast<uint8_t>(type)); }

  template <typename Number>
  void put(Number number) {
    append(&number, sizeof(number));
  }
  void put_text(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  void append(const void* bytes, size_t size) { data_.append(static_cast<const char*>(bytes), size); }
  size_t size() const { return data_.size(); }

  // The finished frame.
  const std::string& frame() {
    const uint32_t length = static_cast<uint32_t>(data_.size() - 4);
    std::memcpy(data_.data(), &length, 4);
    return data_;
  }

 private:
  std::string data_;
};

// Reads a body; throws std::runtime_error instead of reading past its end.
class FrameReader {
 public:
  FrameReader(const char* begin, const char* end) : at_(begin), end_(end) {}

  template <typename Number>
  Number take() {
    Number number;
    std::memcpy(&number, take_bytes(sizeof(number)), sizeof(number));
    return number;
  }
  const char* take_bytes(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) throw std::runtime_error("a frame is shorter than it says");
    const char* bytes = at_;
    at_ += size;
    return bytes;
  }
  std::string take_text() {
    const uint32_t size = take<uint32_t>();
    return std::string(take_bytes(size), size);
  }
  bool is_done() const { return at_ == end_; }
  const char* position() const { return at_; }

 private:
  const char* at_;
  const char* end_;
};

}  // namespace faser

#endif  // FASER_TRITON_WIRE_H_
