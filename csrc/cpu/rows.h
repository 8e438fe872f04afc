// What one row of logits needs, compiled once per instruction set and chosen at load time.
#pragma once

#include <cstdint>

namespace gac {

enum class Dtype { float32, bfloat16, float16 };

// Of one row, with t_i = (x_i - base) slope and slope = log2(e) / temperature, so that 2^t_i is the
// softmax before its normalisation. `sum` is nan where the row has no distribution.
struct RowSums {
  float base;  // the largest logit
  double sum;  // of 2^t_i
  double dot;  // of t_i 2^t_i
};

// Gradient of one row: out_i = 2^t_i (constant + linear t_i).
struct RowGradient {
  double constant;
  double linear;
};

struct RowKernels {
  const char* name;
  // Floats of scratch that a thread needs for rows of `width` logits.
  int64_t (*scratch)(int64_t width);
  // Reads the row from memory once. With `scratch` it keeps what `gradient` needs: the powers 2^t_i
  // at `powers` if given, else in the scratch. `powers` may be a float32 row itself.
  RowSums (*sums)(Dtype, const void* row, int64_t width, float slope, float* scratch,
                  float* powers);
  // Writes the gradient of the row that `sums` saw last. `out` may start where `row` does;
  // `stream` sends a float32 result past the caches. The logits are read under `linear` != 0 only.
  void (*gradient)(Dtype, const void* row, Dtype, void* out, int64_t width, float slope,
                   const RowSums&, RowGradient, const float* scratch, const float* powers,
                   bool stream);
  // buckets[v mod size] = sum of signs[v] row[v]; `size` divides 64.
  void (*buckets)(const float* row, const float* signs, int64_t width, int64_t size, float* buckets);
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

// The widest that this processor runs, or what GAC_CPU_CAPABILITY names (default, avx2, avx512).
// Throws std::invalid_argument where that is unknown or cannot run here.
const RowKernels& row_kernels();

}  // namespace gac
