// Spaces the steps' responses that have waited, since Triton's HTTP server loses those that come too fast.
#ifndef FASER_TRITON_PACE_H_
#define FASER_TRITON_PACE_H_

#include <algorithm>
#include <chrono>
#include <thread>

namespace faser {

// Each HTTP thread of Triton takes responses of generate_stream from a socket pair that holds 277 of them (Linux's
// default of 208 KiB). Of more it loses the end of the stream without an error: the result of evthr_defer is not read
// (2.51 to 2.73). More wait when the server was paused and the engine process went on.
constexpr std::chrono::microseconds kPerResponse{60}, kMostPerStep{4000};  // steps of so many take longer themselves

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
