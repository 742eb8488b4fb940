// An engine process and the socket to it.
#ifndef FASER_TRITON_CHANNEL_H_
#define FASER_TRITON_CHANNEL_H_

#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace faser {

enum class Sent { kYes, kTooMuchWaits, kNobodyReads };

// Sends never block: data that the socket does not take wait in memory, up to kMaxBacklogBytes. The owner locks.
class Channel {
 public:
  Channel();
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Starts `$FASER_PYTHON -m $FASER_ENGINE_MODULE` with one end of a new socket; returns its process id, or -1.
  int start();
  void close();
  bool is_open() const { return socket_ >= 0; }
  Sent send(const std::string& frame);
  // Interrupts wait().
  void wake();

  // For the reading thread, without the owner's lock:
  // Waits for wake(), for bytes, and for room to send if wants_room.
  void wait(int timeout_ms, bool wants_room);
  // Reads the data that have arrived and passes on each whole frame; returns false at the end of the stream.
  // Throws std::runtime_error for a frame that is too long.
  bool receive(const std::function<void(const char* begin, const char* end)>& on_frame);

  // With the owner's lock: sends waiting data; returns true if some still wait.
  bool flush();

 private:
  int socket_ = -1;
  int wake_fd_ = -1;
  std::deque<std::string> backlog_;  // frames; num_sent_ bytes of the first one were sent
  size_t num_sent_ = 0;
  size_t num_backlog_bytes_ = 0;  // not sent yet
  std::vector<char> received_;
  size_t num_received_ = 0;
};

}  // namespace faser

#endif  // FASER_TRITON_CHANNEL_H_
