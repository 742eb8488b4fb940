#include <cstdlib>
#include <cstring>

#include "faser_cpu.h"
#include "kernels.h"

namespace faser {
namespace {

const Kernels& choose() {
  const Kernels* best = portable_kernels();
  const Kernels* avx2 = nullptr;
  const Kernels* avx512bf16 = nullptr;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) avx2 = avx2_kernels();
  if (avx2 != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
    avx512bf16 = avx512bf16_kernels();
#endif
  // FASER_CPU_ISA may name less than the processor has, never more.
  const char* limit = std::getenv("FASER_CPU_ISA");
  const bool portable_only = limit != nullptr && std::strcmp(limit, "portable") == 0;
  const bool avx2_at_most = limit != nullptr && std::strcmp(limit, "avx2") == 0;
  if (avx2 != nullptr && !portable_only) best = avx2;
  if (avx512bf16 != nullptr && !portable_only && !avx2_at_most) best = avx512bf16;
  return *best;
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
