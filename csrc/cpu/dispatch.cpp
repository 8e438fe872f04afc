// Selects the row kernels that this process uses.
#include <cstdlib>
#include <stdexcept>
#include <string>

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

const RowKernels& select() {
  const char* requested = std::getenv("GAC_CPU_CAPABILITY");
  const std::string name = requested ? requested : "";
#if defined(__x86_64__)
  if ((name.empty() || name == "avx512") && runs_avx512()) return avx512::kernels;
  if ((name.empty() || name == "avx2") && runs_avx2()) return avx2::kernels;
#endif
  if (name.empty() || name == "default") return baseline::kernels;
  throw std::invalid_argument("GAC_CPU_CAPABILITY=" + name +
                              ": use default, or avx2 or avx512 if the processor supports it");
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& selected = select();
  return selected;
}

}  // namespace gac
