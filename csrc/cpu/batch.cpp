// Per-token and per-sequence work around the row kernels: token weights, and sums over tokens.
// Mirrors `plan` and `reduce` in gac_kernels/tokens.py, each in one pass and in a fixed order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "native.h"

namespace gac {
namespace {

constexpr int64_t kIgnore = -100;
// In the order of REDUCTIONS in contract.py.
enum class Reduction { sequence, token, constant, sum };

// The denominator of one of the two loss terms.
struct Term {
  Reduction reduction;
  double max_tokens, norm = 0;

  void count(int64_t length) {
    norm += reduction == Reduction::token ? length : reduction != Reduction::sequence || length > 0;
  }
  double weight(int64_t length) const {
    const double per_sequence = reduction == Reduction::sequence   ? length
                                : reduction == Reduction::constant ? max_tokens
                                                                   : 1;
    return per_sequence * norm == 0 ? 0 : 1 / (per_sequence * norm);
  }
};

double phi(float logp) {
  const double p = std::exp(double(logp));
  return p * (1 - p);
}

// The part of a term in the loss; a term of weight 0 has none, even if it is infinite.
double share(double weight, double loss) {
  return weight == 0 && std::isinf(loss) ? 0 : weight * loss;
}

bool is_rollout(const ReduceArguments& a, int64_t s) { return a.rollout_lengths[s] > 0; }

// TokenMoments.rollouts: means first, then sums about them.
void centered_sums(const ReduceArguments& b, double* out) {
  std::vector<double> phis(b.offsets[b.sequences]);
  for (int k = 0; k < 7; ++k) out[k] = 0;
  for (int64_t s = 0; s < b.sequences; ++s) {
    out[0] += is_rollout(b, s);
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i) {
      if (!b.live[i] || b.demo[i]) continue;
      const double w = 1 / double(b.rollout_lengths[s]);
      phis[i] = phi(b.logps[i]);
      out[1] += w * phis[i];
      out[2] += w * b.advantages[i];
    }
  }
  const double n = out[0] > 1 ? out[0] : 1, mean_s = out[1] /= n, mean_r = out[2] /= n;
  for (int64_t s = 0; s < b.sequences; ++s) {
    double mean = 0;
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i) {
      if (!b.live[i] || b.demo[i]) continue;
      const double w = 1 / double(b.rollout_lengths[s]);
      const double ds = phis[i] - mean_s, dr = b.advantages[i] - mean_r;
      out[3] += w * ds * ds;
      out[4] += w * dr * dr;
      out[5] += w * ds * dr;
      mean += w * b.advantages[i];
    }
    if (is_rollout(b, s)) out[6] += (mean - mean_r) * (mean - mean_r);
  }
}

// TokenMoments.demo_nll.
void mean_nll(const ReduceArguments& b, double* out) {
  for (int64_t s = 0; s < b.sequences; ++s) {
    double sum = 0;
    for (int64_t i = b.offsets[s]; i < b.offsets[s + 1]; ++i)
      if (b.demo[i]) sum += b.logps[i];
    const int64_t length = b.lengths[s] - b.rollout_lengths[s];
    out[s] = length > 0 ? -sum / length : -std::numeric_limits<double>::infinity();
  }
}

}  // namespace
}  // namespace gac

const char* gac_plan(const gac::PlanArguments* arguments) {
  using namespace gac;
  const PlanArguments& a = *arguments;
  if (a.tokens && !a.targets) return "targets hold no data";
  const int64_t length = a.tokens / std::max<int64_t>(1, a.sequences);
  for (int64_t s = 0; s <= a.sequences; ++s)
    a.offsets[s] = a.cu_seqlens ? a.cu_seqlens[s] : s * length;
  for (int64_t s = 0; s < a.sequences; ++s)
    if (a.offsets[s] > a.offsets[s + 1]) return "cu_seqlens decreases";
  if (a.offsets[0] != 0 || a.offsets[a.sequences] != a.tokens)
    return "cu_seqlens must start at 0 and end at N";

  const auto is_demo = [&](int64_t s, int64_t i) { return a.is_demo[a.role_per_token ? i : s]; };
  Term terms[2] = {{static_cast<Reduction>(a.rollout_reduction), a.max_tokens},
                   {static_cast<Reduction>(a.demo_reduction), a.max_tokens}};
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.offsets[s], end = a.offsets[s + 1];
    int64_t lengths[2] = {};
    for (int64_t i = begin; i < end; ++i) lengths[is_demo(s, i)] += a.targets[i] != kIgnore;
    a.lengths[s] = lengths[0] + lengths[1];
    a.rollout_lengths[s] = lengths[0];
    // A sequence counts for the roles of its tokens with a loss. If no token has a loss, it counts
    // for the role of its first position.
    const bool known = !a.role_per_token || begin < end;
    for (const int d : {0, 1})
      if (lengths[d] > 0 || (a.lengths[s] == 0 && (known ? is_demo(s, begin) == bool(d) : !d)))
        terms[d].count(lengths[d]);
  }
  if (a.rollout_norm) terms[0].norm = *a.rollout_norm;
  if (a.demo_norm) terms[1].norm = *a.demo_norm;

  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t lengths[2] = {a.rollout_lengths[s], a.lengths[s] - a.rollout_lengths[s]};
    const float weights[2] = {static_cast<float>(terms[0].weight(lengths[0])),
                              static_cast<float>(terms[1].weight(lengths[1]))};
    for (int64_t i = a.offsets[s]; i < a.offsets[s + 1]; ++i) {
      const bool d = is_demo(s, i);
      const bool has_loss = a.targets[i] != kIgnore, rollout = has_loss && !d;
      a.sequence[i] = s;
      a.live[i] = has_loss;
      a.demo[i] = d;
      a.weight[i] = has_loss ? weights[d] : 0;
      a.scale[i] = a.weight[i] * static_cast<float>(d ? a.mu : 1 - a.mu);
      a.advantage[i] =
          rollout || (a.shaped && has_loss) ? a.advantages[a.per_sequence ? s : i] : 0;
      if (a.old) a.old_logps[i] = rollout ? a.old[i] : 0;
      if (a.ref) a.ref_logps[i] = rollout ? a.ref[i] : 0;
    }
  }
  return nullptr;
}

const char* gac_reduce(const gac::ReduceArguments* arguments) {
  using namespace gac;
  const ReduceArguments& a = *arguments;
  if (a.tokens && !a.live) return "the tokens hold no data";
  double totals[6] = {}, term_loss[2] = {};
  for (int64_t i = 0; i < a.tokens; ++i) {
    const bool d = a.demo[i];
    term_loss[d] += a.weight[i] * a.loss[i];  // the product is float32, as in autograd
    totals[2] += a.kl[i];
    totals[3] += a.clipped[i];
    if (!a.live[i]) continue;
    totals[d] += 1;
    totals[4 + d] += a.entropy[i];
  }
  if (!a.has_ref) totals[2] = std::numeric_limits<double>::quiet_NaN();
  *a.mixed_loss = static_cast<float>(share(1 - a.mu, term_loss[0]) + share(a.mu, term_loss[1]));
  *a.rollout_loss = static_cast<float>(term_loss[0]);
  *a.demo_loss = static_cast<float>(term_loss[1]);
  *a.mean_kl = static_cast<float>(totals[2] / totals[0]);
  *a.clip_fraction = static_cast<float>(totals[3] / (totals[0] > 1 ? totals[0] : 1));
  if (a.totals) {
    centered_sums(a, a.rollouts);
    mean_nll(a, a.demo_nll);
    std::copy(totals, totals + 6, a.totals);
  }
  return nullptr;
}
