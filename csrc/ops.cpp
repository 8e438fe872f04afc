// The one list of native operators. Their meaning is that of the functions of the same names in
// gac_kernels/backends/__init__.py; the files in cpu/ and cuda/ register what runs.
#include <torch/library.h>

TORCH_LIBRARY(gac_native, m) {
  m.def("cpu_capability() -> str");
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
      " float temperature, Tensor(a!)? out)"
      " -> (Tensor logps, Tensor entropy, Tensor loss, Tensor kl, Tensor clipped)");
}
