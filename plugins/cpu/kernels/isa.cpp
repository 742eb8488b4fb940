#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "faser_cpu.h"
#include "kernels.h"

namespace faser {
namespace {

#if defined(__x86_64__)

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512bf16() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// True if the processor has AMX tiles and Linux lets this process use them.
bool has_amxbf16() {
#if defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (edx & kBf16) && (edx & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

struct Candidate {
  const Kernels* kernels;
  bool (*is_supported)();
};

const Kernels& choose() {
  // FASER_CPU_ISA can only lower the instruction set.
  const char* limit = std::getenv("FASER_CPU_ISA");
#if defined(__x86_64__)
  __builtin_cpu_init();
  const Candidate candidates[] = {
      {amxbf16_kernels(), has_amxbf16}, {avx512bf16_kernels(), has_avx512bf16}, {avx2_kernels(), has_avx2}};
  bool is_known = false;
  for (const Candidate& candidate : candidates)
    is_known |= limit != nullptr && candidate.kernels != nullptr && std::strcmp(limit, candidate.kernels->name) == 0;
  bool is_allowed = !is_known && (limit == nullptr || std::strcmp(limit, "portable") != 0);
  for (const Candidate& candidate : candidates) {
    if (candidate.kernels == nullptr) continue;
    is_allowed |= is_known && std::strcmp(limit, candidate.kernels->name) == 0;
    if (is_allowed && candidate.is_supported()) return *candidate.kernels;
  }
#else
  (void)limit;
#endif
  return *portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace faser

extern "C" {

int32_t faser_abi_version(void) { return FASER_ABI_VERSION; }

const char* faser_isa(void) { return faser::kernels().name; }
}
