// Schemas of all native operators. They behave as documented under the same names in
// gac_kernels/backends/__init__.py; the files in cpu/ register the implementations (cuda/ has a
// plain C interface instead).
#include <torch/library.h>

TORCH_LIBRARY(gac_native, m) {
  m.def("cpu_capability() -> str");
  m.def(
      "plan(Tensor targets, Tensor advantages, Tensor is_demo, float mu, Tensor? old, Tensor? ref,"
      " Tensor? cu_seqlens, bool shaped, int rollout_reduction, int demo_reduction,"
      " float max_tokens, float? rollout_norm, float? demo_norm)"
      " -> (Tensor live, Tensor demo, Tensor advantage, Tensor old_logps, Tensor ref_logps,"
      " Tensor weight, Tensor scale, Tensor sequence, Tensor offsets, Tensor lengths)");
  m.def(
      "reduce(Tensor live, Tensor demo, Tensor advantages, Tensor weight, Tensor offsets,"
      " Tensor lengths, Tensor is_demo, float mu, bool has_ref, Tensor logps, Tensor entropy,"
      " Tensor loss, Tensor kl, Tensor clipped, bool moments)"
      " -> (Tensor mixed_loss, Tensor rollout_loss, Tensor demo_loss, Tensor mean_kl,"
      " Tensor clip_fraction, Tensor rollouts, Tensor demo_nll, Tensor totals)");
  m.def(
      "row_stats(Tensor logits, Tensor targets, float temperature)"
      " -> (Tensor logps, Tensor entropy, Tensor lse)");
  m.def(
      "row_grads(Tensor logits, Tensor targets, Tensor d_logps, Tensor d_entropy,"
      " float temperature, Tensor(a!) out) -> ()");
  m.def(
      "row_loss(Tensor logits, Tensor targets, Tensor demo, Tensor advantages, Tensor? old,"
      " Tensor? ref, Tensor scale, float ratio_low, float ratio_high, float dual_clip,"
      " float kl_coef, int kl_estimator, float entropy_coef, int demo_weight, float demo_shape,"
      " float temperature, Tensor(a!)? out, Tensor? signs, Tensor(b!)? buckets)"
      " -> (Tensor logps, Tensor entropy, Tensor loss, Tensor kl, Tensor clipped)");
}
