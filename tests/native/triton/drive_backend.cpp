// Drives the backend `faser` against the stub of Triton and the stub engine process, under a sanitizer.
//
//   drive_backend ENGINE [--seed=N] [--seconds=N] [--only=NAME] [--skip=NAME] [--log]
//
// First every scenario, then random ones until the time is over. It ends with an error where an answer is not what the
// engine process was told to say, an object of Triton is left, or the stub or the sanitizer finds something.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "stub_triton.h"

namespace {

using stub::broken;
using stub::Input;
using stub::Model;
using stub::Request;
using Pointer = std::shared_ptr<Request>;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
  std::abort();
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Pointer asking(const std::string& script) {
  auto request = std::make_shared<Request>();
  request->id = "a request";
  request->inputs.push_back(
      {"script", 13, {1, 1}, {script.substr(0, script.size() / 2), script.substr(script.size() / 2)}});
  request->outputs = {"text", "index"};
  return request;
}

// Returns true if the outputs are those of the stub engine's k-th response to a request.
bool is_right(const stub::Response& response, size_t k) {
  if (response.outputs.size() != 2 || response.outputs[0].name != "text" || response.outputs[1].name != "index")
    return false;
  const std::string& bytes = response.outputs[0].bytes;
  if (response.outputs[0].shape != std::vector<int64_t>{1, static_cast<int64_t>(bytes.size())}) return false;
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != static_cast<char>(k * 31 + i)) return false;
  int32_t index;
  std::memcpy(&index, response.outputs[1].bytes.data(), sizeof(index));
  return index == static_cast<int32_t>(k);
}

// The request's end: its responses must be right up to an error, which it returns ("" for none).
std::string ended(const Pointer& request, size_t num_responses = SIZE_MAX) {
  request->wait();
  std::string error;
  size_t k = 0;
  for (const stub::Response& response : request->responses()) {
    expect(error.empty(), "nothing follows an error");
    error = response.error;
    if (!error.empty() || response.outputs.empty()) continue;
    expect(is_right(response, k++), "a response is as it was sent");
  }
  if (num_responses != SIZE_MAX) expect(error.empty() && k == num_responses, "all responses arrive: " + error);
  return error;
}

std::string answer(Model& model, const std::string& script) {
  const Pointer request = asking(script);
  model.execute(request);
  return ended(request);
}

// Waits until the engine process answers again after a crash.
void await_service(Model& model) {
  for (int i = 0; i < 600; ++i) {
    if (answer(model, "R3").empty()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  expect(false, "the engine process comes back");
}

void load(Model& model) {
  const std::string error = model.load();
  expect(error.empty(), "a model is loaded: " + error);
}

// Scenarios

void streams() {
  Model model("streams", "o0");
  load(model);
  expect(model.is_ready(), "a model that was loaded is ready");
  std::vector<Pointer> requests;
  for (int i = 0; i < 30; ++i) requests.push_back(asking("r10s3r0s0b3r1r2r70000r5w1r9R20"));
  model.execute(requests);
  for (const Pointer& request : requests) ended(request, 8);
  const Pointer flag = asking("r4f");
  flag->id = nullptr;
  model.execute(flag);
  ended(flag, 1);
}

void errors() {
  Model model("errors", "o0");
  load(model);
  for (const int code : {0, 1, 3, 4, 7, 200}) {
    const Pointer plain = asking("r3e" + std::to_string(code)), record = asking("e" + std::to_string(code));
    record->parameters = {{"another", "1"}, {"error_codes", "1"}};
    model.execute({plain, record});
    expect(ended(plain) == "it is \"wrong\"\n", "an error is its sentence: " + ended(plain));
    expect(plain->responses().back().code == code, "an error keeps its code");
    const char* const name = code == 3   ? "INVALID_ARG"
                             : code == 4 ? "UNAVAILABLE"
                             : code == 7 ? "CANCELLED"
                                         : "INTERNAL";
    expect(ended(record) == "{\"code\": \"" + std::string(name) +
                                "\", \"field\": \"top_k\", \"value\": \"-1\\\\\", \"limit\": \"0\\u0001 or more\", "
                                "\"message\": \"it is \\\"wrong\\\"\\u000a\"}",
           "error_codes asks for a record: " + ended(record));
  }
}

void cancellation() {
  Model model("cancellation", "o0");
  load(model);
  std::vector<Pointer> requests;
  for (int i = 0; i < 8; ++i) requests.push_back(asking("r3c"));
  model.execute(requests);
  for (const Pointer& request : requests) request->wait_for_responses(1);
  for (const Pointer& request : requests) request->cancel();
  for (const Pointer& request : requests) {
    ended(request);
    expect(request->responses().back().code == 7, "a cancelled request ends as the engine process says");
  }
}

void large_responses() {
  Model model("large", "o0");
  load(model);
  const Pointer slow = asking("r400000r10r300000R5"), quick = asking("r5w1r5R5"), failed = asking("r400000r10w5000R1");
  slow->send_ms = 100;
  failed->send_ms = 50;
  model.execute({slow, failed});
  model.execute(quick);
  ended(quick, 3);
  expect(!slow->wait_for(0), "a stream does not wait for another's large responses");
  ended(slow, 4);
  failed->wait_for_responses(2);
  answer(model, "k");
  expect(has(ended(failed), "stopped"), "large responses end with the engine process, too");
}

void large_responses_of_several() {
  Model model("several", "o0");
  load(model);
  const Pointer slow = asking("r20000r20000r20000r20000r20000r20000R20000"), quick = asking("R20000");
  slow->send_ms = 100;
  model.execute(slow);
  slow->wait_for_responses(1);
  model.execute(quick);
  ended(quick, 1);
  expect(!slow->wait_for(0), "requests with large responses take turns");
  ended(slow, 7);
}

// 90 MB each: the fourth is too much.
void more_than_can_be_sent() {
  Model model("too much", "o0");
  load(model);
  const Pointer greedy = asking("r90000000r90000000r90000000r90000000r9c");
  greedy->send_ms = 60'000;
  model.execute(greedy);
  answer(model, "R5");  // all of it has come
  greedy->send_ms = 0;
  expect(has(ended(greedy), "faster than the server can send"), "a request ends whose output fills the memory");
  answer(model, "R20000");
}

// The engine process dies in one way or another while requests run: all end, and it serves again.
void crashes() {
  Model model("crashes", "t959111o0");
  load(model);
  for (const char* const way : {"k", "x0", "x9", "h", "g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"}) {
    std::vector<Pointer> others;
    for (int i = 0; i < 5; ++i) others.push_back(asking("r3w60000R3"));
    model.execute(others);
    for (const Pointer& other : others) other->wait_for_responses(1);
    const Pointer request = asking(std::string("r8") + way);
    model.execute(request);
    expect(has(ended(request), "the engine process"), std::string("a crash ends a request: ") + way);
    for (const Pointer& other : others)
      expect(has(ended(other), "stopped while it served"), "a crash ends all requests: " + ended(other));
    await_service(model);
  }
  expect(stub::metric("faser_request_failures_total{code=UNAVAILABLE,model=crashes,version=1}") >= 60,
         "requests that a crash ended are counted");
}

void hangs() {
  Model model("hangs", "t919111o0");  // unhealthy after 1 s without progress, hung after 9 s
  load(model);
  const Pointer stalled = asking("w100000f");
  model.execute(stalled);
  std::string error;
  while (!has(error, "in one step for")) {  // a ping's answer may come between
    model.execute(asking("p2000f"));
    error = answer(model, "R1");
    expect(error.empty() || has(error, "in one step for"), "a step that does not end is named: " + error);
  }
  while (!model.is_ready()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  while (!stalled->wait_for(0.005)) model.execute(asking("p20000f"));
  expect(has(ended(stalled), "stopped"), "a hung engine process is restarted");
  await_service(model);
}

void silence() {
  Model model("silence", "t913111o0");
  load(model);
  const Pointer request = asking("z30000R1");
  model.execute(request);
  while (model.is_ready()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  expect(has(answer(model, "R1"), "has not answered for"), "silence is named");
  expect(has(ended(request), "stopped"), "a silent engine process is restarted");
  await_service(model);
}

void loads() {
  const auto refused = [](const char* config, const char* why) {
    Model model("refused", config);
    const std::string error = model.load();
    expect(has(error, why), std::string("a model that cannot be opened says why: ") + config + ": " + error);
  };
  refused("F", "no such engine");
  refused("k", "ended before it was ready");
  refused("g4", "ended before it was ready");
  refused("v7", "ended before it was ready");
  refused("dx0", "shutting down");
  refused("t100000n", "not ready within");
  // Another configuration has another process; the same one shares it.
  Model first("first", "o0"), second("second", "o1"), third("third", "o0");
  load(first);
  load(second);
  load(third);
  expect(answer(first, "R1").empty() && answer(second, "R1").empty() && answer(third, "R1").empty(), "each serves");
  Model fails("fails", "F");
  expect(has(fails.load(), "no such engine"), "a model is refused by a process that serves another");
  first.unload();
  expect(answer(third, "R1").empty(), "a process serves until its last model is gone");
  third.unload();
  expect(answer(second, "R1").empty(), "the other goes on");
  second.unload();
  Model late("late", "o0"), again("again", "q2o0");
  load(late);
  answer(late, "k");
  const std::string error = again.load();  // a process that is starting again: it dies once more
  expect(error.empty() || has(error, "engine process"), "a model is loaded while the process starts again: " + error);
  for (const char* const function :
       {"ModelName", "ModelVersion", "ModelRepository", "ModelConfig", "MessageSerializeToJson"}) {
    Model broken_model("broken", "o0");
    broken_model.fails = function;
    expect(has(broken_model.load(), "failed"), std::string("the error is Triton's own: ") + function);
  }
}

void drain() {
  Model model("drain", "o0");
  load(model);
  const Pointer running = asking("r2w300R2");
  model.execute(running);
  running->wait_for_responses(1);
  model.execute(asking("dR1"));
  std::string error;
  while (error.empty()) error = answer(model, "R1");
  expect(has(error, "shutting down") || has(error, "stopped"), "a draining process takes nothing: " + error);
  ended(running, 2);
  Model other("other", "o0");
  expect(has(other.load(), "shutting down"), "nor does it open models");
  while (model.is_ready()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

void limits() {
  Model model("limits", "o0");
  load(model);
  Pointer request = asking("R1");
  request->inputs.push_back({"large", 2, {1}, {std::string(64 << 20, 'x')}});
  model.execute(request);
  expect(has(ended(request), "send less"), "a request is at most 64 MiB");
  request = asking("R1");
  request->inputs.push_back({"gpu", 2, {1}, {"x"}});
  request->inputs.back().is_on_gpu = true;
  model.execute(request);
  expect(has(ended(request), "GPU memory"), "inputs are in host memory");
  request = asking("R1");
  request->inputs.push_back({"short", 2, {1}, {"x"}});
  request->inputs.back().num_missing_bytes = 5;
  model.execute(request);
  expect(has(ended(request), "fewer bytes"), "inputs are whole");
  request = asking("R1");
  request->parameters = {{"x-faser-client", "proxy's"}, {"x-faser-client", "client's"}};
  model.execute(request);
  expect(has(ended(request), "sent twice"), "a client's name is the proxy's alone");
}

// A process that does not read: what waits is bounded.
void backlog() {
  Model model("backlog", "t999111o0");
  load(model);
  model.execute(asking("Zf"));
  siginfo_t stopped;
  expect(waitid(P_ALL, 0, &stopped, WSTOPPED | WNOWAIT) == 0, "the engine process stops");
  std::vector<Pointer> waiting;
  std::string errors;
  const std::string large(60 << 20, 'x');
  for (int i = 0; i < 6; ++i) {
    waiting.push_back(asking("R1"));
    waiting.back()->inputs.push_back({"large", 2, {1}, {large}});
    model.execute(waiting.back());
    waiting.back()->inputs.pop_back();
  }
  kill(stopped.si_pid, SIGCONT);
  for (const Pointer& each : waiting) errors += ended(each);
  expect(has(errors, "does not take requests"), "what waits for a process that does not read is bounded: " + errors);
  await_service(model);
}

// Each function of Triton fails once. The request ends all the same, if only by its final flag.
void failures() {
  Model model("failures", "t959111o0");
  load(model);
  for (const char* const function :
       {"RequestId", "RequestInputCount", "RequestInputByIndex", "InputProperties", "InputBuffer", "RequestOutputCount",
        "RequestOutputName", "RequestParameterCount", "RequestParameter", "ResponseFactoryIsCancelled",
        "ResponseNewFromFactory", "ResponseOutput", "OutputBuffer", "OutputBuffer is on a GPU",
        "ModelInstanceReportStatistics", "ResponseFactoryNew"}) {
    for (const char* const script : {"r5w50R6", "e3", "w5000"}) {
      if (script[0] == 'w' && std::strncmp(function, "Response", 8) != 0) continue;
      const Pointer request = asking(script);
      request->parameters = {{"error_codes", "1"}};
      request->fails = function;
      model.execute(request);
      if (script[0] == 'w') {
        answer(model, "w30k");
        await_service(model);
      }
      request->wait();
    }
  }
}

void metrics() {
  Model model("metrics", "o0");
  load(model);
  for (const char* const function : {"MetricFamilyNew", "MetricArgsNew", "MetricNewWithArgs"}) {
    stub::failing_metric_function = function;
    answer(model, "m1f");
  }
  stub::failing_metric_function = nullptr;
  answer(model, "m0f");
  const double before = stub::metric("stub_total{model=stub}");
  answer(model, "m3f");
  answer(model, "m2f");
  expect(stub::metric("stub_total{model=stub}") == before + 1 + 2 + 3 + 1 + 2, "counters add up");
  expect(stub::metric("stub_gauge{model=stub}") == 2, "a gauge is what it was set to");
  expect(stub::metric("stub_ms{model=stub}") >= 5, "a histogram counts");
  answer(model, "k");
  await_service(model);
  expect(stub::metric("stub_gauge{model=stub}") == 0, "a gauge rests with its process");
  answer(model, "m1f");
  expect(stub::metric("stub_total{model=stub}") == before + 10, "a counter goes on");
}

void versions() {
  const auto error_of = [](uint32_t minor) {
    stub::api_minor = minor;
    TRITONSERVER_Error* const error = TRITONBACKEND_Initialize(nullptr);
    const std::string message = error == nullptr ? "" : TRITONSERVER_ErrorMessage(error);
    if (error != nullptr) TRITONSERVER_ErrorDelete(error);
    return message;
  };
  expect(has(error_of(18), "2.51 or newer"), "an old server is named");
  expect(has(error_of(0), "ApiVersion failed"), "a failure is Triton's own");
  expect(error_of(25).empty() && error_of(19).empty(), "newer servers load the backend");
}

void unload_of_running() {
  auto model = std::make_unique<Model>("running", "o0");
  load(*model);
  std::vector<Pointer> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(asking("r300000w50r5R300000"));
  model->execute(requests);
  model.reset();
  for (const Pointer& request : requests) ended(request, 3);
}

// Several threads load models, send requests, cancel and crash the engine processes.
void random_traffic(uint64_t seed) {
  constexpr int kThreads = 4, kRequests = 25;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, seed] {
      std::mt19937_64 random(seed * kThreads + static_cast<uint64_t>(t));
      const auto below = [&random](uint64_t n) { return static_cast<int>(random() % n); };
      Model model("random" + std::to_string(t),
                  std::string(below(4) == 0 ? "t912121o" : "o") + std::to_string(below(2)));
      const std::string failed = model.load();
      if (!failed.empty() && !has(failed, "engine process") && !has(failed, "shutting down"))
        expect(false, "a model that is not loaded says why: " + failed);
      if (!failed.empty()) return;
      std::vector<Pointer> requests;
      for (int i = 0; i < kRequests; ++i) {
        std::string script;
        const int num_steps = below(6);
        for (int s = 0; s < num_steps; ++s) {
          const char* const steps[] = {"r5", "r70", "w1", "w10", "r300000", "b2r1r2",
                                       "s7", "s0",  "m2", "r0",  "p10",     "z3"};
          script += steps[below(12)];
        }
        const int end = below(40);
        if (end < 2) script += std::vector<const char*>{"k", "g0", "g1", "g3", "g4", "x1"}[below(6)];
        script += end < 6 ? "c" : end < 10 ? "e4" : end < 14 ? "f" : "R9";
        requests.push_back(asking(script));
        if (below(8) == 0) requests.back()->send_ms = 1 + below(10);
        if (below(8) == 0) requests.back()->parameters = {{"error_codes", "1"}};
        model.execute(requests.back());
        if (script.back() == 'c' || below(10) == 0) requests.back()->cancel();
        if (below(4) == 0) ended(requests[below(requests.size())]);
        if (below(6) == 0) model.is_ready();
      }
      if (below(2) == 0)
        for (const Pointer& request : requests) ended(request);
      model.unload();
      for (const Pointer& request : requests) ended(request);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Scenario {
  const char* name;
  void (*run)();
};

constexpr Scenario kScenarios[] = {{"versions", versions},
                                   {"streams", streams},
                                   {"errors", errors},
                                   {"cancellation", cancellation},
                                   {"large_responses", large_responses},
                                   {"large_responses_of_several", large_responses_of_several},
                                   {"more_than_can_be_sent", more_than_can_be_sent},
                                   {"crashes", crashes},
                                   {"hangs", hangs},
                                   {"silence", silence},
                                   {"loads", loads},
                                   {"drain", drain},
                                   {"limits", limits},
                                   {"backlog", backlog},
                                   {"failures", failures},
                                   {"metrics", metrics},
                                   {"unload_of_running", unload_of_running}};

void no_engine_process() {
  Model model("nowhere", "o0");
  const std::string error = model.load();
  expect(has(error, "ended before it was ready"), "a process that cannot be started is told: " + error);
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  uint64_t seed = 1;
  double seconds = 5;
  std::string only, skipped;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--seed=", 0) == 0) seed = std::stoull(argument.substr(7));
    if (argument.rfind("--seconds=", 0) == 0) seconds = std::stod(argument.substr(10));
    if (argument.rfind("--only=", 0) == 0) only = argument.substr(7);
    if (argument.rfind("--skip=", 0) == 0) skipped = argument.substr(7);
    if (argument == "--log") stub::prints_log = true;
  }
  setenv("FASER_ENGINE_MODULE", "stub", 1);
  setenv("FASER_PYTHON", "/nowhere/python3", 1);
  if (only.empty()) no_engine_process();
  setenv("FASER_PYTHON", argc > 1 ? argv[1] : "", 1);
  const auto started = Clock::now();
  const auto seconds_since = [&started] { return std::chrono::duration<double>(Clock::now() - started).count(); };
  for (const Scenario& scenario : kScenarios) {
    if (!only.empty() && only != scenario.name) continue;
    if (skipped == scenario.name) continue;
    const double before = seconds_since();
    scenario.run();
    expect(stub::num_held() == 0, std::string(scenario.name) + " leaves nothing of Triton's");
    std::printf("%-18s %.1f s\n", scenario.name, seconds_since() - before);
    std::fflush(stdout);
  }
  const double end = seconds_since() + seconds;
  int num_rounds = 0;
  for (; only.empty() || only == "random"; ++num_rounds) {
    if (seconds_since() >= end) break;
    random_traffic(seed++);
    expect(stub::num_held() == 0, "random traffic leaves nothing of Triton's");
  }
  expect(waitpid(-1, nullptr, WNOHANG) < 0, "no engine process is left");
  std::printf("%d rounds of random traffic, %zu lines of log\n", num_rounds, stub::num_log_lines());
}
