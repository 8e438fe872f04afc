// Interface of the row kernels, compiled once per instruction set and selected on first use.
#pragma once

#include <cstdint>

namespace gac {

enum class Dtype { float32, bfloat16, float16 };

// Sums over one row, with t_i = (x_i - base) exp2_scale and exp2_scale = log2(e) / temperature, so
// that 2^t_i is the unnormalized softmax. `sum` is nan if a logit is nan or +inf, and 0 if all are -inf:
// neither row has a distribution.
struct RowSums {
  float base;  // the largest logit
  double sum;  // of 2^t_i
  double dot;  // of t_i 2^t_i
  double squares, total;  // of 2^(2 t_i) and of x_i; only if `more`
};

// Gradient of one row: out_i = 2^t_i (constant + linear t_i) (1 - (x_i inverse_cap)^2).
struct RowGradient {
  double constant;
  double linear;
  double inverse_cap;  // 1 / softcap for a row from `cap`; 0: the last factor is 1
};

struct RowKernels {
  const char* name;
  // Reads or writes one element of a row.
  float (*get)(Dtype, const void* row, int64_t i);
  void (*set)(Dtype, void* row, int64_t i, float value);
  // Number of scratch floats per thread for rows of `width` logits.
  int64_t (*scratch)(int64_t width);
  // Reads the row from memory once. With `scratch`, it stores what `gradient` needs: the powers
  // 2^t_i, in `powers` if given, else in the scratch buffer. `powers` may be the row itself if that
  // is float32. `more` is only valid without `scratch`.
  RowSums (*sums)(Dtype, const void* row, int64_t width, float exp2_scale, float* scratch,
                  float* powers, bool more);
  // Whether one of the first `count` logits is at least `value`.
  bool (*reaches)(Dtype, const void* row, int64_t count, float value);
  // capped_i = softcap tanh(x_i / softcap); infinities are kept, because -inf is a masked entry.
  void (*cap)(Dtype, const void* row, int64_t width, float softcap, float* capped);
  // Writes the gradient of the row that was last passed to `sums`. `out` may start at the address
  // of `row`; `stream` writes a float32 result with non-temporal stores. The logits are read only
  // if `linear` != 0 or `inverse_cap` != 0, which requires float32 logits.
  void (*gradient)(Dtype, const void* row, Dtype, void* out, int64_t width, float exp2_scale,
                   const RowSums&, RowGradient, const float* scratch, const float* powers,
                   bool stream);
};

namespace baseline {
extern const RowKernels kernels;
}
namespace avx2 {
extern const RowKernels kernels;
}
namespace avx512 {
extern const RowKernels kernels;
}

// The kernels for the widest supported instruction set, or for the one named by GAC_CPU_CAPABILITY
// (default, avx2, avx512); null if that is unknown or not supported here.
const RowKernels* row_kernels();

}  // namespace gac
