// Per-token and per-sequence work around the row kernels: token weights, and sums over tokens.
// Mirrors `plan` and `reduce` in gac_kernels/tokens.py, each in one pass and in a fixed order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "column.h"

namespace gac {
namespace {

using at::Tensor;

constexpr int64_t kIgnore = -100;
enum class Reduction { sequence, token, constant };  // in the order of REDUCTIONS in contract.py

Tensor flatten(const Tensor& t, at::ScalarType dtype) { return t.detach().reshape(-1).to(dtype); }

std::optional<Tensor> flatten(const std::optional<Tensor>& t, at::ScalarType dtype) {
  return t ? std::optional<Tensor>(flatten(*t, dtype)) : std::nullopt;
}

template <class T>
struct Result {
  Tensor tensor;
  T* data;
  explicit Result(int64_t count)
      : tensor(at::empty({count}, c10::CppTypeToScalarType<T>::value)),
        data(tensor.mutable_data_ptr<T>()) {}
  T& operator[](int64_t i) const { return data[i]; }
};

// The start of each sequence and the end of the last one: cu_seqlens, or the rows of [B, T].
Result<int64_t> sequence_offsets(const Tensor& targets, const std::optional<Tensor>& cu_seqlens,
                                 int64_t sequences) {
  const Result<int64_t> offsets(sequences + 1);
  if (!cu_seqlens) {
    TORCH_CHECK_VALUE(targets.dim() == 2 && targets.size(0) == sequences, "targets has shape ",
                      targets.sizes(), ": expected [", sequences, ", T]");
    for (int64_t s = 0; s <= sequences; ++s) offsets[s] = s * targets.size(1);
    return offsets;
  }
  const Column<int64_t> cu("cu_seqlens", flatten(*cu_seqlens, at::kLong), sequences + 1);
  for (int64_t s = 0; s <= sequences; ++s) {
    offsets[s] = cu[s];
    TORCH_CHECK_VALUE(offsets[s] >= (s ? offsets[s - 1] : 0), "cu_seqlens decreases at index ", s);
  }
  TORCH_CHECK_VALUE(offsets[0] == 0 && offsets[sequences] == targets.numel(),
                    "cu_seqlens must start at 0 and end at N = ", targets.numel());
  return offsets;
}

// The denominator of one of the two loss terms.
struct Term {
  Reduction reduction;
  double max_tokens, norm = 0;

  void count(int64_t length) {
    norm += reduction == Reduction::token ? length : reduction == Reduction::constant || length > 0;
  }
  double weight(int64_t length) const {
    const double per_sequence = reduction == Reduction::token      ? 1
                                : reduction == Reduction::constant ? max_tokens
                                                                   : length;
    return per_sequence * norm == 0 ? 0 : 1 / (per_sequence * norm);
  }
};

using Plan = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                        Tensor>;

Plan plan(const Tensor& targets, const Tensor& advantages, const Tensor& is_demo, double mu,
          const std::optional<Tensor>& old, const std::optional<Tensor>& ref,
          const std::optional<Tensor>& cu_seqlens, bool shaped, int64_t rollout_reduction,
          int64_t demo_reduction, double max_tokens, std::optional<double> rollout_norm,
          std::optional<double> demo_norm) {
  const int64_t n = targets.numel(), sequences = is_demo.numel();
  const Column<int64_t> y("targets", flatten(targets, at::kLong), n);
  const Column<bool> demo_flags("is_demo", is_demo, sequences);
  const bool per_sequence = advantages.sizes() == is_demo.sizes();
  const Column<float> a("advantages", flatten(advantages, at::kFloat),
                        per_sequence ? sequences : n);
  const Column<float> old_values("old_logps", flatten(old, at::kFloat), n),
      ref_values("ref_logps", flatten(ref, at::kFloat), n);
  const Result<int64_t> offsets = sequence_offsets(targets, cu_seqlens, sequences);
  const Result<int64_t> lengths(sequences), sequence(n);
  const Result<bool> live(n), demo(n);
  const Result<float> weight(n), scale(n), advantage(n), old_logp(old_values ? n : 0),
      ref_logp(ref_values ? n : 0);

  Term terms[2] = {{static_cast<Reduction>(rollout_reduction), max_tokens},
                   {static_cast<Reduction>(demo_reduction), max_tokens}};
  for (int64_t s = 0; s < sequences; ++s) {
    lengths[s] = 0;
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) lengths[s] += y[i] != kIgnore;
    terms[demo_flags[s]].count(lengths[s]);
  }
  terms[0].norm = rollout_norm.value_or(terms[0].norm);
  terms[1].norm = demo_norm.value_or(terms[1].norm);

  for (int64_t s = 0; s < sequences; ++s) {
    const bool d = demo_flags[s];
    const float w = static_cast<float>(terms[d].weight(lengths[s]));
    const float term_weight = static_cast<float>(d ? mu : 1 - mu);
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
      const bool has_loss = y[i] != kIgnore, rollout = has_loss && !d;
      sequence[i] = s;
      live[i] = has_loss;
      demo[i] = d;
      weight[i] = has_loss ? w : 0;
      scale[i] = weight[i] * term_weight;
      advantage[i] = rollout || (shaped && has_loss) ? a[per_sequence ? s : i] : 0;
      if (old_values) old_logp[i] = rollout ? old_values[i] : 0;
      if (ref_values) ref_logp[i] = rollout ? ref_values[i] : 0;
    }
  }
  return {live.tensor,  demo.tensor,  advantage.tensor, old_logp.tensor, ref_logp.tensor,
          weight.tensor, scale.tensor, sequence.tensor,  offsets.tensor,  lengths.tensor};
}

// `Tokens` and `TokenTerms`, N tokens in S sequences.
struct Batch {
  Column<bool> live, demo;
  Column<float> advantages, weight;
  Column<int64_t> offsets, lengths;
  Column<bool> is_demo;
  Column<float> logps, entropy, loss, kl, clipped;
  int64_t sequences;

  bool rollout(int64_t s) const { return lengths[s] > 0 && !is_demo[s]; }
  // Weight of each of the sequence's tokens in the moments; 0 for demonstrations, so that a nan in
  // one still propagates.
  double token_weight(int64_t s) const { return rollout(s) ? 1 / double(lengths[s]) : 0; }
};

double phi(float logp) {
  const double p = std::exp(double(logp));
  return p * (1 - p);
}

// TokenMoments.rollouts: means first, then sums about them.
void centered_sums(const Batch& b, double* out) {
  std::vector<double> phis(b.offsets[b.sequences]);
  for (int k = 0; k < 7; ++k) out[k] = 0;
  for (int64_t s = 0; s < b.sequences; ++s) {
    const double w = b.token_weight(s);
    out[0] += b.rollout(s);
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i) {
      if (!b.live[i]) continue;
      phis[i] = phi(b.logps[i]);
      out[1] += w * phis[i];
      out[2] += w * b.advantages[i];
    }
  }
  const double n = out[0] > 1 ? out[0] : 1, mean_s = out[1] /= n, mean_r = out[2] /= n;
  for (int64_t s = 0; s < b.sequences; ++s) {
    const double w = b.token_weight(s);
    double mean = 0;
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i) {
      if (!b.live[i]) continue;
      const double ds = phis[i] - mean_s, dr = b.advantages[i] - mean_r;
      out[3] += w * ds * ds;
      out[4] += w * dr * dr;
      out[5] += w * ds * dr;
      mean += w * b.advantages[i];
    }
    if (b.rollout(s)) out[6] += (mean - mean_r) * (mean - mean_r);
  }
}

// TokenMoments.demo_nll.
void mean_nll(const Batch& b, double* out) {
  for (int64_t s = 0; s < b.sequences; ++s) {
    double sum = 0;
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i) sum += b.logps[i];
    const bool is_nonempty_demo = b.lengths[s] > 0 && b.is_demo[s];
    out[s] = is_nonempty_demo ? -sum / b.lengths[s] : -std::numeric_limits<double>::infinity();
  }
}

using Summary = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Summary reduce(const Tensor& live, const Tensor& demo, const Tensor& advantages,
               const Tensor& weight, const Tensor& offsets, const Tensor& lengths,
               const Tensor& is_demo, double mu, bool has_ref, const Tensor& logps,
               const Tensor& entropy, const Tensor& loss, const Tensor& kl, const Tensor& clipped,
               bool moments) {
  const int64_t n = live.numel(), sequences = is_demo.numel();
  const Batch b{{"live", live, n}, {"demo", demo, n}, {"advantages", advantages, n},
                {"weight", weight, n}, {"offsets", offsets, sequences + 1},
                {"lengths", lengths, sequences}, {"is_demo", is_demo, sequences},
                {"logps", logps, n}, {"entropy", entropy, n}, {"loss", loss, n}, {"kl", kl, n},
                {"clipped", clipped, n}, sequences};
  TORCH_CHECK_VALUE(b.offsets[0] == 0 && b.offsets[sequences] == n,
                    "offsets must start at 0 and end at N = ", n);
  double totals[6] = {}, term_loss[2] = {};
  for (int64_t i = 0; i < n; ++i) {
    const bool d = b.demo[i];
    term_loss[d] += b.weight[i] * b.loss[i];  // the product is float32, as in autograd
    totals[2] += b.kl[i];
    totals[3] += b.clipped[i];
    if (!b.live[i]) continue;
    totals[d] += 1;
    totals[4 + d] += b.entropy[i];
  }
  if (!has_ref) totals[2] = std::numeric_limits<double>::quiet_NaN();
  const double scalars[5] = {(1 - mu) * term_loss[0] + mu * term_loss[1], term_loss[0],
                             term_loss[1], totals[2] / totals[0],
                             totals[3] / (totals[0] > 1 ? totals[0] : 1)};
  const Result<double> rollouts(moments ? 7 : 0), nll(moments ? sequences : 0),
      sums(moments ? 6 : 0);
  if (moments) {
    centered_sums(b, rollouts.data);
    mean_nll(b, nll.data);
    std::copy(totals, totals + 6, sums.data);
  }
  const auto scalar = [&](int k) { return at::scalar_tensor(scalars[k], at::kFloat); };
  return {scalar(0), scalar(1), scalar(2), scalar(3), scalar(4), rollouts.tensor, nll.tensor,
          sums.tensor};
}

}  // namespace

TORCH_LIBRARY_IMPL(gac_native, CPU, m) {
  m.impl("plan", plan);
  m.impl("reduce", reduce);
}

}  // namespace gac
