#include "channel.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "log.h"
#include "wire.h"

extern char** environ;

namespace faser {
namespace {

constexpr int kChildFd = 3;
constexpr size_t kReadBytes = 1 << 18;
constexpr size_t kKeptBytes = 8 << 20;  // size of the buffer after a larger frame was read

std::string variable(const char* name, const char* fallback) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

// fork() would copy a process with many threads; posix_spawn does not.
int spawn(int socket) {
  const std::string python = variable("FASER_PYTHON", "python3");
  const std::string module = variable("FASER_ENGINE_MODULE", "faser_trtllm.serving.engine_process.main");
  const std::string parent = "--parent_pid=" + std::to_string(getpid());
  const std::string fd = "--backend_fd=" + std::to_string(kChildFd);
  const char* const arguments[] = {python.c_str(), "-m", module.c_str(), fd.c_str(), parent.c_str(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", 0, 0);
  posix_spawn_file_actions_adddup2(&actions, socket, kChildFd);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  for (const int signal : {SIGTERM, SIGINT, SIGPIPE, SIGCHLD}) sigaddset(&signals, signal);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = -1;
  const int failure =
      posix_spawnp(&pid, python.c_str(), &actions, &attributes, const_cast<char* const*>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (failure == 0) return pid;
  log_error("the engine process could not be started with " + python + ": " + std::strerror(failure));
  return -1;
}

}  // namespace

Channel::Channel() : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_fd_ < 0) throw std::runtime_error(std::string("no event could be made: ") + std::strerror(errno));
}

Channel::~Channel() {
  close();
  ::close(wake_fd_);
}

int Channel::start() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    log_error(std::string("no socket could be made: ") + std::strerror(errno));
    return -1;
  }
  // dup2 of a descriptor to its own number would leave it closed in the child.
  int theirs = ends[1];
  if (theirs == kChildFd) theirs = dup(theirs);
  const int pid = spawn(theirs);
  ::close(ends[1]);
  if (theirs != ends[1]) ::close(theirs);
  if (pid < 0) {
    ::close(ends[0]);
    return -1;
  }
  socket_ = ends[0];
  return pid;
}

void Channel::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  backlog_.clear();
  num_sent_ = num_backlog_bytes_ = 0;
  num_received_ = 0;
}

Sent Channel::send(const std::string& frame) {
  if (socket_ < 0) return Sent::kNobodyReads;
  if (num_backlog_bytes_ + frame.size() > kMaxBacklogBytes) return Sent::kTooMuchWaits;
  const bool was_empty = backlog_.empty();
  size_t num_sent = 0;
  if (was_empty) {
    const ssize_t sent = ::send(socket_, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0)
      num_sent = static_cast<size_t>(sent);
    else if (errno != EAGAIN && errno != EINTR)
      return Sent::kNobodyReads;
    if (num_sent == frame.size()) return Sent::kYes;
    num_sent_ = num_sent;
  }
  backlog_.push_back(frame);
  num_backlog_bytes_ += frame.size() - num_sent;
  if (was_empty) wake();
  return Sent::kYes;
}

bool Channel::flush() {
  while (!backlog_.empty()) {
    const std::string& first = backlog_.front();
    const ssize_t sent =
        ::send(socket_, first.data() + num_sent_, first.size() - num_sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) break;  // the reader notices a broken socket
    num_sent_ += static_cast<size_t>(sent);
    num_backlog_bytes_ -= static_cast<size_t>(sent);
    if (num_sent_ < first.size()) continue;
    backlog_.pop_front();
    num_sent_ = 0;
  }
  return !backlog_.empty();
}

void Channel::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void Channel::wait(int timeout_ms, bool wants_room) {
  const short wanted = static_cast<short>(POLLIN | (wants_room ? POLLOUT : 0));
  pollfd events[2] = {{wake_fd_, POLLIN, 0}, {socket_, wanted, 0}};
  if (poll(events, 2, timeout_ms) <= 0 || events[0].revents == 0) return;
  uint64_t count;
  [[maybe_unused]] const ssize_t taken = read(wake_fd_, &count, sizeof(count));
}

bool Channel::receive(const std::function<void(const char*, const char*)>& on_frame) {
  for (;;) {
    if (received_.size() - num_received_ < kReadBytes) received_.resize(num_received_ + kReadBytes);
    const ssize_t got = recv(socket_, received_.data() + num_received_, received_.size() - num_received_, MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    num_received_ += static_cast<size_t>(got);
    size_t start = 0;
    while (num_received_ - start >= 4) {
      uint32_t length;
      std::memcpy(&length, received_.data() + start, 4);
      if (length > kMaxAnswerBytes) throw std::runtime_error("a frame is too long");
      if (num_received_ - start - 4 < length) break;
      const char* const begin = received_.data() + start + 4;
      on_frame(begin, begin + length);
      start += 4 + length;
    }
    if (start == 0) continue;
    std::memmove(received_.data(), received_.data() + start, num_received_ - start);
    num_received_ -= start;
    if (num_received_ <= kReadBytes && received_.size() > kKeptBytes) {
      received_.resize(num_received_);
      received_.shrink_to_fit();
    }
  }
}

}  // namespace faser
