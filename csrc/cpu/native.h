// The exported functions, loaded with ctypes by gac_kernels/backends/cpu.py, which mirrors the
// structures: every field has eight bytes, so that their layout has no gaps. They use neither torch
// nor Python, so one binary works with every version of both.
//
// The caller has checked the shapes and dtypes; all arrays are contiguous except the logits and
// their gradient, which are [B, T, V] with a contiguous last dimension. A null pointer is an absent
// input. Each function returns null, or an error message.
#pragma once

#include <cstdint>

#include "../token_math.h"

namespace gac {

// The rows of [B, T, V]; strides in elements.
struct Matrix {
  void* data;
  int64_t dtype;  // gac::Dtype
  int64_t batch_stride, row_stride;
};

// Arguments of the three functions that read rows; each ignores what it does not need.
struct RowArguments {
  Matrix logits, out;
  int64_t rows, vocab, per_batch;  // N = B T, V and T
  int64_t threads;
  double temperature, softcap;  // softcap 0: none
  const float* temperatures;  // [N], or null: `temperature`
  const int64_t* targets;
  float *logps, *entropy, *lse;  // results; of `gac_row_grads`, null or those of the whole row
  float *log_sum_sq_probs, *mean_logits, *is_top1;  // further results of `gac_row_stats`
  const float *d_logps, *d_entropy;
  const bool* demo;
  const float *advantages, *old, *ref, *scale, *factor, *rollout_logps;
  float *loss, *kl, *clipped;  // results
  double options[kTokenOptions];  // a TokenSpec
};

struct PlanArguments {
  const int64_t* targets;
  const float* advantages;
  const bool* is_demo;
  const float *old, *ref;
  const int64_t* cu_seqlens;
  bool *live, *demo;
  float *advantage, *old_logps, *ref_logps, *weight, *scale;
  int64_t *sequence, *offsets, *lengths, *rollout_lengths;
  int64_t tokens, sequences;
  int64_t per_sequence;  // whether there is one advantage per sequence
  int64_t role_per_token;  // whether is_demo is [tokens], not [sequences]
  double mu;
  int64_t shaped, rollout_reduction, demo_reduction;
  double max_tokens;
  const double *rollout_norm, *demo_norm;
};

struct ReduceArguments {
  const bool *live, *demo;
  const float *advantages, *weight;
  const int64_t *offsets, *lengths, *rollout_lengths;
  const float *logps, *entropy, *loss, *kl, *clipped;
  float *mixed_loss, *rollout_loss, *demo_loss, *mean_kl, *clip_fraction;
  double *rollouts, *demo_nll, *totals;  // null: no moments
  int64_t tokens, sequences;
  double mu;
  int64_t has_ref;
};

}  // namespace gac

#define GAC_EXPORT extern "C" __attribute__((visibility("default")))

// The hash of this file that setup.py passed, to detect a library that was built from another one.
GAC_EXPORT const char* gac_interface();
GAC_EXPORT const char* gac_cpu_capability();  // null: GAC_CPU_CAPABILITY is unknown or unsupported
GAC_EXPORT const char* gac_plan(const gac::PlanArguments*);
GAC_EXPORT const char* gac_reduce(const gac::ReduceArguments*);
GAC_EXPORT const char* gac_row_stats(const gac::RowArguments*);
GAC_EXPORT const char* gac_row_grads(const gac::RowArguments*);
GAC_EXPORT const char* gac_row_loss(const gac::RowArguments*);
