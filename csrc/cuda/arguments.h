// The arguments of one launch. gac_kernels/backends/cuda.py mirrors the struct field by field.
#pragma once

#include <cstdint>

#include "../token_math.h"

namespace gac::cuda {

enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16 };
enum Task : int32_t { kStats, kGrads, kLoss };

// N rows of V logits: row n starts at (n / per_batch) batch_stride + (n % per_batch) row_stride,
// in elements. Columns are [N]; null if absent.
struct Arguments {
  const void* logits;
  void* out;  // the gradient, null if not needed; may share the logits' storage
  const int64_t* targets;
  const uint8_t* demo;
  const float* advantages;
  const float* old;
  const float* ref;
  const float* scale;
  const float* factor;
  const float* rollout_logps;
  const float* d_logps;
  const float* d_entropy;
  float* results;  // kStats [3, N]: logp, entropy, lse; kLoss [5, N]: as TokenTerms
  int64_t rows, per_batch, vocab;
  int64_t batch_stride, row_stride, out_batch_stride, out_row_stride;
  float exp2_scale;  // log2(e) / temperature
  float inverse_temperature;
  float options[kTokenOptions];  // a TokenSpec
  int32_t task, dtype, out_dtype;
  int32_t cluster;  // blocks that share a row: 1, 2, 4 or 8
  int32_t slots;    // tiles of shared memory per block
  int32_t device;
};

}  // namespace gac::cuda
