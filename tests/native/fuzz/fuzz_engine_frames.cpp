// Bytes that an engine process may write to its socket, in any pieces. The backend's whole engine reads them while
// requests are open. The process is simulated: functions of the system that start it, end it and wait for it are
// replaced at link time (--wrap).
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "engine.h"
#include "input.h"
#include "stub_request.h"

namespace {

std::atomic<int> peer{-1};

std::string frame(uint8_t type, const std::string& body) {
  const uint32_t length = static_cast<uint32_t>(body.size() + 1);
  return std::string(reinterpret_cast<const char*>(&length), 4) + static_cast<char>(type) + body;
}

void write_all(int fd, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t got = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (got <= 0) return;
    sent += static_cast<size_t>(got);
  }
}

}  // namespace

extern "C" {

int __real_socketpair(int domain, int type, int protocol, int* ends);

int __wrap_socketpair(int domain, int type, int protocol, int* ends) {
  const int result = __real_socketpair(domain, type, protocol, ends);
  const int before = peer.exchange(dup(ends[1]));
  if (before >= 0) close(before);
  return result;
}

int __wrap_posix_spawnp(pid_t* pid, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*,
                        char* const*, char* const*) {
  *pid = 1 << 30;
  std::string opened(4, '\0');
  opened += std::string(2, '\0') + std::string(4, '\0');
  write_all(peer, frame(2, opened));
  return 0;
}

pid_t __wrap_waitpid(pid_t pid, int* status, int) {
  *status = 0;
  return pid;
}

int __wrap_kill(pid_t, int) { return 0; }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  std::vector<std::unique_ptr<StubRequest>> requests;
  {
    faser::Engine engine;
    uint32_t model;
    const faser::Opened opened = engine.open({"m", "1", "/nowhere", "{}"}, &model);
    fuzz_expect(opened.status == faser::OpenStatus::kOpened && engine.is_ready(), "a model is opened");
    const int num_requests = input.in(1, 3);  // of handles 1, 2, 3
    for (int i = 0; i < num_requests; ++i) {
      requests.push_back(std::make_unique<StubRequest>());
      requests.back()->client->keeps_responses = false;
      engine.submit(model, requests.back()->request);
    }
    const int fd = peer;
    while (input.size_left() > 0) {
      const size_t piece = input.flag() ? 65535 : input.take<uint8_t>();
      const std::string bytes = input.text(piece);
      // A frame whose length the fuzzer need not know, or bytes as they are.
      write_all(fd, input.flag() || bytes.empty() ? bytes : frame(static_cast<uint8_t>(bytes[0]), bytes.substr(1)));
    }
    shutdown(fd, SHUT_RDWR);
    for (const auto& request : requests) request->client->wait();
    engine.close(model);
  }
  requests.clear();
  return 0;
}
