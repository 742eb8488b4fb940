// Numbers and texts from a fuzzer's bytes; zeros once they are used up.
#ifndef FASER_FUZZ_INPUT_H_
#define FASER_FUZZ_INPUT_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  template <typename Number>
  Number take() {
    Number number{};
    const size_t size = size_left() < sizeof(number) ? size_left() : sizeof(number);
    if (size > 0) std::memcpy(&number, at_, size);
    at_ += size;
    return number;
  }
  // A number from first to last, of one byte.
  int in(int first, int last) { return first + take<uint8_t>() % (last - first + 1); }
  bool flag() { return take<uint8_t>() % 2 != 0; }
  std::string text(size_t size) {
    if (size > size_left()) size = size_left();
    const std::string text(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return text;
  }
  size_t size_left() const { return static_cast<size_t>(end_ - at_); }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

inline void fuzz_expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // FASER_FUZZ_INPUT_H_
