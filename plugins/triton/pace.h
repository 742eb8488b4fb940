// Spaces out responses that have waited, since Triton's HTTP server loses responses that come too fast.
#ifndef FASER_TRITON_PACE_H_
#define FASER_TRITON_PACE_H_

#include <algorithm>
#include <chrono>
#include <thread>

namespace faser {

// Each HTTP thread of Triton takes responses of generate_stream from a socket pair that holds 277 of them (Linux's
// default of 208 KiB). If there are more, it loses the end of the stream without an error, since it ignores the result
// of evthr_defer (2.51 to 2.73). More can wait if the server was paused while the engine process continued.
constexpr std::chrono::microseconds kPerResponse{60}, kMostPerStep{4000};  // steps with more responses take longer

class Pace {
 public:
  // Around the responses of a step.
  void begin() const { std::this_thread::sleep_until(next_); }
  void end(int num_responses) {
    next_ = std::chrono::steady_clock::now() + std::min(num_responses * kPerResponse, kMostPerStep);
  }

 private:
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace faser

#endif  // FASER_TRITON_PACE_H_
