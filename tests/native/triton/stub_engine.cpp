// An engine process that does what its clients say: the input "script" of a request, and the configuration of a model.
//
// A script is steps of a letter and a number each:
//   r, R  a response of so many bytes; R is the last one        f     the final flag without a response
//   e     an error of this code, with fields                    c     waits for the cancellation, then ends with it
//   w     waits so many ms                                      z     sleeps so many ms: nothing is read or sent
//   Z     stops as by SIGSTOP
//   s     sends what follows in pieces of this many bytes       b     holds so many steps' frames to send them as one
//   k, x  dies of SIGKILL; ends with this status                m     metrics, of so many changes
//   p     a pong: the executor has made no progress for so many ms
//   d     drains: ends once all requests have ended
//   h     hangs up, and lives on
//   g     a bad frame: 0 of an unknown type, 1 too long, 2 cut off, 3 an answer to nobody, 4 half of one and then dies,
//         5 a metric change of an unknown kind, 6 of no bytes, 7 a response longer than its frame
// A configuration is such steps too, run when the model is opened, and the last one says what becomes of it:
//   o     it is opened, or, if another group than this number was opened first, it has another configuration
//   F     it is refused                                         n     nothing is said
//   t     times: digits for startup, health, hang, back-off, its most and the cancellation check, in s or,
//         the last three, in 0.1 s
//   v     the next hello speaks this version                    q     dies if the process was started fewer times
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "wire.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFd = 3;
constexpr uint32_t kVersion = 3;
enum Type : uint8_t { kHello = 1, kOpened, kResponses, kPong, kDraining, kMetrics };
enum Received : uint8_t { kGotHello = 1, kOpen, kClose, kRequest, kCancel, kPing };

struct Bytes {
  std::string data;
  template <typename Number>
  Bytes& put(Number number) {
    data.append(reinterpret_cast<const char*>(&number), sizeof(number));
    return *this;
  }
  Bytes& text(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    data += text;
    return *this;
  }
};

struct Reader {
  const char* at;
  template <typename Number>
  Number take() {
    Number number;
    std::memcpy(&number, at, sizeof(number));
    at += sizeof(number);
    return number;
  }
  std::string text() {
    const uint32_t size = take<uint32_t>();
    at += size;
    return std::string(at - size, size);
  }
};

struct Script {
  std::string steps;
  size_t at = 0;
  Clock::time_point due = Clock::now();
  bool waits_for_cancel = false, is_cancelled = false;
  int num_responses = 0;

  bool next(char* letter, int* number) {
    if (at >= steps.size()) return false;
    *letter = steps[at++];
    *number = 0;
    while (at < steps.size() && steps[at] >= '0' && steps[at] <= '9') *number = *number * 10 + (steps[at++] - '0');
    return true;
  }
};

size_t piece_bytes = 0;
int held_steps = 0;
std::string held_body;

void send_all(const std::string& data) {
  for (size_t sent = 0; sent < data.size();) {
    size_t size = data.size() - sent;
    if (piece_bytes > 0 && size > piece_bytes) size = piece_bytes;
    const ssize_t got = send(kFd, data.data() + sent, size, MSG_NOSIGNAL);
    if (got < 0) _exit(0);
    sent += static_cast<size_t>(got);
    if (piece_bytes > 0) usleep(50);
  }
}

void send_frame(uint8_t type, const std::string& body) {
  Bytes frame;
  frame.put(static_cast<uint32_t>(body.size() + 1)).put(type);
  send_all(frame.data + body);
}

void send_response(const std::string& body) {
  held_body += body;
  if (held_steps > 0 && --held_steps > 0) return;
  send_frame(kResponses, held_body);
  held_body.clear();
}

void put_output(Bytes& body, const std::string& name, uint8_t datatype, const std::string& bytes) {
  body.put(static_cast<uint8_t>(name.size()));
  body.data += name;
  body.put('\0').put(datatype).put(static_cast<uint8_t>(2));
  body.put(static_cast<int64_t>(1)).put(static_cast<int64_t>(bytes.size()));
  body.put(static_cast<uint32_t>(bytes.size()));
  body.data += bytes;
}

std::string response(uint64_t handle, Script& script, int num_bytes, bool is_final) {
  std::string bytes(static_cast<size_t>(num_bytes), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(script.num_responses * 31 + i);
  Bytes body;
  body.put(handle).put(static_cast<uint8_t>(4 | (is_final ? 1 : 0))).put(static_cast<uint16_t>(2));
  put_output(body, "text", 2, bytes);
  put_output(body, "index", 8, std::string(reinterpret_cast<const char*>(&script.num_responses), 4));
  ++script.num_responses;
  return body.data;
}

std::string error(uint64_t handle, int code) {
  Bytes body;
  body.put(handle).put(static_cast<uint8_t>(3)).put(static_cast<uint8_t>(code));
  body.text("it is \"wrong\"\n").text("top_k").text("-1\\").text("0\x01 or more");
  return body.data;
}

std::string metrics(int count) {
  Bytes body;
  const auto declare = [&](uint32_t id, uint8_t kind, const char* name, bool buckets) {
    body.put(static_cast<uint8_t>(1)).put(id).put(kind).text(name).text("help").put(static_cast<uint32_t>(1));
    body.text("model").text("stub").put(static_cast<uint32_t>(buckets ? 2 : 0));
    if (buckets) body.put(0.5).put(1.5);
  };
  declare(1, 0, "stub_total", false);
  declare(2, 1, "stub_gauge", false);
  declare(3, 2, "stub_ms", true);
  declare(4, 1, "faser_engine_ready", false);
  for (uint8_t op = 2; op <= 4; ++op)
    for (int i = 0; i < count; ++i) body.put(op).put(static_cast<uint32_t>(op == 4 ? 3 : op - 1)).put(double(i + 1));
  body.put(static_cast<uint8_t>(2)).put(static_cast<uint32_t>(77)).put(1.0);  // of no series
  body.put(static_cast<uint8_t>(3)).put(static_cast<uint32_t>(1)).put(1.0);   // a counter cannot be set
  return body.data;
}

std::string failure_counter(const std::string& model) {
  Bytes body;
  for (const char* code : {"UNAVAILABLE", "INVALID_ARG"}) {
    body.put(static_cast<uint8_t>(1)).put(static_cast<uint32_t>(code[0])).put(static_cast<uint8_t>(0));
    body.text("faser_request_failures_total").text("help").put(static_cast<uint32_t>(3));
    body.text("model").text(model).text("version").text("1").text("code").text(code);
    body.put(static_cast<uint32_t>(0));
  }
  return body.data;
}

void send_bad_frame(int kind) {
  Bytes bytes;
  if (kind == 0) send_frame(99, "?");
  if (kind == 1) send_all(bytes.put(static_cast<uint32_t>(600u << 20)).data);
  if (kind == 2) send_frame(kHello, "ab");
  if (kind == 3) send_frame(kResponses, bytes.put(static_cast<uint64_t>(1) << 60).put(static_cast<uint8_t>(1)).data);
  if (kind == 4) {
    send_all(bytes.put(static_cast<uint32_t>(1000)).put(static_cast<uint8_t>(kResponses)).data);
    raise(SIGKILL);
  }
  if (kind == 5) {
    const std::string declared = metrics(0);
    bytes.put(static_cast<uint8_t>(9)).put(static_cast<uint32_t>(1)).put(1.0);
    send_frame(kMetrics, declared + bytes.data);
  }
  if (kind == 6) send_all(bytes.put(static_cast<uint32_t>(0)).data);
  if (kind == 7) send_frame(kResponses, bytes.put(uint64_t{1}).put(uint8_t{4}).put(uint16_t{1}).put(uint8_t{200}).data);
}

class Engine {
 public:
  void run() {
    std::string received;
    for (;;) {
      const bool reads = poll_once();
      if (reads) {
        char buffer[1 << 16];
        const ssize_t got = recv(kFd, buffer, sizeof(buffer), MSG_DONTWAIT);
        if (got == 0) _exit(0);
        if (got > 0) received.append(buffer, static_cast<size_t>(got));
        size_t start = 0;
        uint32_t length;
        while (received.size() - start >= 4) {
          std::memcpy(&length, received.data() + start, 4);
          if (received.size() - start - 4 < length) break;
          take(Reader{received.data() + start + 4});
          start += 4 + length;
        }
        received.erase(0, start);
      }
      run_scripts();
      if (drains_ && scripts_.empty()) _exit(0);
    }
  }

 private:
  bool poll_once() {
    int timeout_ms = 200;
    const auto now = Clock::now();
    for (const auto& [handle, script] : scripts_) {
      if (script.waits_for_cancel && !script.is_cancelled) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(script.due - now).count();
      timeout_ms = std::max(0, std::min(timeout_ms, static_cast<int>(left)));
    }
    pollfd event = {kFd, POLLIN, 0};
    return poll(&event, 1, timeout_ms) > 0;
  }

  void hello() {
    Bytes body;
    body.put(version_);
    for (const double time : times_) body.put(time);
    send_frame(kHello, body.data);
  }

  void take(Reader body) {
    const auto type = body.take<uint8_t>();
    if (type == kGotHello) {
      if (body.take<uint32_t>() != kVersion) _exit(3);
      num_starts_ = static_cast<int>(body.take<uint32_t>());
      hello();
    } else if (type == kOpen) {
      const uint32_t model = body.take<uint32_t>();
      const std::string name = body.text(), version = body.text(), repository = body.text();
      if (version != "1" || repository != "/nowhere/" + name) _exit(4);
      open(model, name, body.text());
    } else if (type == kRequest) {
      request(body);
    } else if (type == kCancel) {
      const auto found = scripts_.find(body.take<uint64_t>());
      if (found != scripts_.end()) found->second.is_cancelled = true;
    } else if (type == kPing) {
      pong(0.0);
    }
  }

  void pong(double stalled_s) { send_frame(kPong, Bytes().put(stalled_s).put(0.01).data); }

  void open(uint32_t model, const std::string& name, const std::string& config) {
    Script script;
    script.steps = config;
    char letter;
    int number;
    while (script.next(&letter, &number)) {
      uint8_t status;
      if (letter == 't') {
        for (int i = 5; i >= 0; --i, number /= 10) times_[i] = number % 10 * 0.1;
        times_[0] *= 10;
        times_[1] *= 10;
        times_[2] *= 10;
        hello();
        continue;
      } else if (letter == 'v') {
        version_ = static_cast<uint32_t>(number);
        hello();
        continue;
      } else if (letter == 'q') {
        if (num_starts_ < number) raise(SIGKILL);
        continue;
      } else if (letter == 'n') {
        return;
      } else if (letter == 'o') {
        if (group_ < 0) group_ = number;
        status = group_ == number ? 0 : 1;
      } else if (letter == 'F') {
        status = 2;
      } else {
        step(0, script, letter, number);
        continue;
      }
      Bytes opened;
      opened.put(model).put(status).put(static_cast<uint8_t>(3)).text(status == 2 ? "no such engine" : "");
      if (status == 0) send_frame(kMetrics, failure_counter(name));
      send_frame(kOpened, opened.data);
    }
  }

  void request(Reader body) {
    body.take<uint32_t>();
    const uint64_t handle = body.take<uint64_t>();
    body.text();
    body.text();
    const uint32_t count = body.take<uint32_t>();
    Script& script = scripts_[handle];
    for (uint32_t i = 0; i < count; ++i) {
      const std::string name = body.text();
      body.take<uint8_t>();
      body.at += 8 * body.take<uint32_t>();
      const uint64_t size = body.take<uint64_t>();
      if (name == "script") script.steps.assign(body.at, size);
      body.at += size;
    }
  }

  void run_scripts() {
    for (auto found = scripts_.begin(); found != scripts_.end();) {
      if (advance(found->first, found->second))
        ++found;
      else
        found = scripts_.erase(found);
    }
  }

  // Returns true if the request goes on.
  bool advance(uint64_t handle, Script& script) {
    char letter;
    int number;
    while (script.due <= Clock::now()) {
      if (script.waits_for_cancel) {
        if (!script.is_cancelled) return true;
        send_response(error(handle, 7));
        return false;
      }
      if (!script.next(&letter, &number)) return false;
      if (!step(handle, script, letter, number)) return false;
    }
    return true;
  }

  // Returns true if the request goes on.
  bool step(uint64_t handle, Script& script, char letter, int number) {
    switch (letter) {
      case 'r':
      case 'R':
        send_response(response(handle, script, number, letter == 'R'));
        return letter == 'r';
      case 'f':
        send_response(Bytes().put(handle).put(uint8_t{1}).data);
        return false;
      case 'e':
        send_response(error(handle, number));
        return false;
      case 'c':
        script.waits_for_cancel = true;
        return true;
      case 'w':
        script.due = Clock::now() + std::chrono::milliseconds(number);
        return true;
      case 'z':
        usleep(static_cast<useconds_t>(number) * 1000);
        return true;
      case 'Z':
        raise(SIGSTOP);
        return true;
      case 's':
        piece_bytes = static_cast<size_t>(number);
        return true;
      case 'b':
        held_steps = number;
        return true;
      case 'k':
        raise(SIGKILL);
        return true;
      case 'x':
        _exit(number);
      case 'm':
        send_frame(kMetrics, metrics(number));
        return true;
      case 'p':
        pong(number / 1000.0);
        return true;
      case 'd':
        drains_ = true;
        send_frame(kDraining, "");
        return true;
      case 'h':
        shutdown(kFd, SHUT_RDWR);
        for (;;) pause();
      case 'g':
        send_bad_frame(number);
        return true;
    }
    _exit(5);
  }

  std::map<uint64_t, Script> scripts_;
  double times_[6] = {20, 5, 60, 0.05, 0.4, 0.02};
  uint32_t version_ = kVersion;
  int num_starts_ = 0, group_ = -1;
  bool drains_ = false;
};

}  // namespace

int main() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Engine().run();
}
