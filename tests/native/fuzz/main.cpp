// Runs a fuzz target without libFuzzer, as any compiler builds it: the files given, then mutations of them.
//
//   TARGET [-runs=N] [-seed=N] [-max_len=N] [-max_total_time=SECONDS] CORPUS...
//
// The flags are libFuzzer's; -runs counts mutations. An input that ends the process is left in crash-input.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "input.h"

namespace {

using Bytes = std::vector<uint8_t>;

const Bytes* running = nullptr;

void save_input() {
  if (running == nullptr) return;
  if (std::FILE* const file = std::fopen("crash-input", "wb")) {
    std::fwrite(running->data(), 1, running->size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in crash-input\n");
  }
}

void run(const Bytes& bytes) {
  running = &bytes;
  const Bytes exact(bytes.begin(), bytes.end());  // no room after its end, where a sanitizer looks
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  running = nullptr;
}

Bytes mutated(const std::vector<Bytes>& corpus, size_t max_len, std::mt19937_64& random) {
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % (n > 0 ? n : 1)); };
  Bytes bytes = corpus[below(corpus.size())];
  for (size_t count = 1 + below(6); count > 0; --count) {
    const size_t at = below(bytes.size() + 1);
    switch (bytes.empty() ? 3 : below(7)) {
      case 0:
        bytes[below(bytes.size())] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        bytes[below(bytes.size())] = static_cast<uint8_t>(random());
        break;
      case 2: {
        const uint8_t edges[] = {0, 1, 127, 128, 255};
        for (size_t i = at, end = std::min(bytes.size(), at + 1 + below(8)); i < end; ++i) bytes[i] = edges[below(5)];
        break;
      }
      case 3:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 1 + below(9), static_cast<uint8_t>(random()));
        break;
      case 4:
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), at + below(16))));
        break;
      case 5: {
        const Bytes& other = corpus[below(corpus.size())];
        const size_t from = below(other.size() + 1);
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        break;
      }
      default:
        bytes.resize(at);
    }
  }
  if (bytes.size() > max_len) bytes.resize(max_len);
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  uint64_t num_runs = 0, seed = 1, max_len = 4096;
  double seconds = 0;
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals), value = argument.substr(equals + 1);
    if (name == "-runs") num_runs = std::stoull(value);
    if (name == "-seed") seed = std::stoull(value);
    if (name == "-max_len") max_len = std::stoull(value);
    if (name == "-max_total_time") seconds = std::stod(value);
    if (argument[0] == '-') continue;
    std::vector<std::filesystem::path> files;
    if (std::filesystem::is_directory(argument))
      for (const auto& entry : std::filesystem::directory_iterator(argument)) files.push_back(entry.path());
    else
      files.emplace_back(argument);
    std::sort(files.begin(), files.end());
    for (const auto& path : files) {
      std::ifstream file(path, std::ios::binary);
      corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  std::signal(SIGABRT, [](int) {
    save_input();
    std::signal(SIGABRT, SIG_DFL);
    std::abort();
  });
  for (const Bytes& bytes : corpus) run(bytes);
  const size_t num_files = corpus.size();
  if (corpus.empty()) corpus.emplace_back();
  std::mt19937_64 random(seed);
  uint64_t num_mutations = 0;
  const auto seconds_since = [&started] { return std::chrono::duration<double>(Clock::now() - started).count(); };
  while (num_mutations < num_runs || (num_runs == 0 && seconds_since() < seconds)) {
    run(mutated(corpus, max_len, random));
    ++num_mutations;
  }
  std::printf("%zu files, %llu mutations in %.1f s\n", num_files, static_cast<unsigned long long>(num_mutations),
              seconds_since());
}
