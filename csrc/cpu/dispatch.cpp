// Selects the row kernels that this process uses.
#include <cstdlib>
#include <cstring>

#include "native.h"
#include "rows.h"

namespace gac {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool runs_avx512() { return runs_avx2() && __builtin_cpu_supports("avx512f"); }
#endif

const RowKernels* select() {
  const char* const name = std::getenv("GAC_CPU_CAPABILITY");
  const auto allowed = [&](const char* isa) {
    return !name || !*name || std::strcmp(name, isa) == 0;
  };
#if defined(__x86_64__)
  if (allowed("avx512") && runs_avx512()) return &avx512::kernels;
  if (allowed("avx2") && runs_avx2()) return &avx2::kernels;
#endif
  return allowed("default") ? &baseline::kernels : nullptr;
}

}  // namespace

const RowKernels* row_kernels() {
  static const RowKernels* const selected = select();
  return selected;
}

}  // namespace gac

const char* gac_cpu_capability() {
  const gac::RowKernels* const kernels = gac::row_kernels();
  return kernels ? kernels->name : nullptr;
}

const char* gac_interface() { return GAC_INTERFACE; }
