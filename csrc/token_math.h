// The loss of one token and its derivatives in closed form, for both host and device code.
// Mirrors `token_terms` in gac_kernels/reference.py, where autograd computes the derivatives.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define GAC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GAC_HOST_DEVICE inline
#endif

namespace gac {

// In the order of CHOICES in gac_kernels/contract.py.
enum class KlEstimator { k1, k2, k3 };
enum class DemoWeight { one, p, phi, shaped, trust };
enum class Policy { clip, cispo, sapo, reinforce };

// MAX_LOG_RATIO and FLOAT16_BOUND in gac_kernels/contract.py
constexpr int kMaxLogRatio = 40, kFloat16Bound = 1 << 15;

constexpr int kTokenOptions = 15;

// The per-token options of LossSpec; a missing bound is infinite. The Python side passes them as an
// array of numbers, in this order (LossSpec.token_options in gac_kernels/contract.py).
template <class Real>
struct TokenSpec {
  Real ratio_low;   // 1 - clip_low
  Real ratio_high;  // 1 + clip_high
  Real dual_clip;
  Real kl_coef;
  KlEstimator kl_estimator;
  Real entropy_coef;
  DemoWeight demo_weight;
  Real demo_shape;
  Policy policy;
  Real sapo_tau_positive, sapo_tau_negative;  // for advantages > 0, and the others
  bool kl_ratio;
  // The correction of the current log-probs: set to 0, or to a bound, outside the bounds.
  bool mask_correction;
  Real correction_min, correction_max;

  template <class Number>
  GAC_HOST_DEVICE static TokenSpec of(const Number (&options)[kTokenOptions]) {
    int i = 0;
    const auto real = [&] { return static_cast<Real>(options[i++]); };
    const auto index = [&] { return static_cast<int>(options[i++]); };
    TokenSpec spec;
    spec.ratio_low = real();
    spec.ratio_high = real();
    spec.dual_clip = real();
    spec.kl_coef = real();
    spec.kl_estimator = static_cast<KlEstimator>(index());
    spec.entropy_coef = real();
    spec.demo_weight = static_cast<DemoWeight>(index());
    spec.demo_shape = real();
    spec.policy = static_cast<Policy>(index());
    spec.sapo_tau_positive = real();
    spec.sapo_tau_negative = real();
    spec.kl_ratio = index() != 0;
    spec.mask_correction = index() != 0;
    spec.correction_min = real();
    spec.correction_max = real();
    return spec;
  }
};

template <class Real>
struct TokenLoss {
  Real loss = 0;
  Real kl = 0;          // the estimator, without its coefficient
  bool clipped = false;  // clipping removed the gradient
  Real d_logp = 0;      // derivatives of `loss`
  Real d_entropy = 0;
};

template <class Real>
GAC_HOST_DEVICE void add_kl(Real logp, Real ref, Real ratio, bool overflows,
                            const TokenSpec<Real>& spec, TokenLoss<Real>& token) {
  const Real d = ref - logp;
  Real d_kl;
  switch (spec.kl_estimator) {
    case KlEstimator::k1: token.kl = -d; d_kl = 1; break;
    case KlEstimator::k2: token.kl = d * d / 2; d_kl = -d; break;
    default: token.kl = std::expm1(d) - d; d_kl = -std::expm1(d);
  }
  if (spec.kl_coef == 0) return;
  if (spec.kl_ratio) {
    token.loss += spec.kl_coef * ratio * token.kl;
    token.d_logp += spec.kl_coef * ratio * (d_kl + (overflows ? 0 : token.kl));
  } else {
    token.loss += spec.kl_coef * token.kl;
    token.d_logp += spec.kl_coef * d_kl;
  }
}

// Multiplies the loss; a token of weight 0 has no loss, even if its log-probability is -inf.
template <class Real>
GAC_HOST_DEVICE void weigh(Real logp, Real weight, TokenLoss<Real>& token) {
  token.loss = weight == 0 && logp == -HUGE_VAL ? 0 : token.loss * weight;
  token.d_logp *= weight;
}

// The importance factor of a token with this log-ratio to the policy that sampled it; nan: 1.
template <class Real>
GAC_HOST_DEVICE Real correction(Real log_ratio, const TokenSpec<Real>& spec) {
  const Real low = spec.correction_min, high = spec.correction_max;
  const Real factor = log_ratio == log_ratio ? std::exp(log_ratio) : Real(1);
  if (spec.mask_correction) return factor < low || factor > high ? Real(0) : factor;
  return factor < low ? low : factor > high ? high : factor;
}

// The finite derivative of a scaled loss, so bounded that no logit's gradient overflows in float16.
template <class Real>
GAC_HOST_DEVICE Real bound_for_float16(Real d_logp, Real temperature) {
  const Real size = std::fabs(d_logp), bound = kFloat16Bound * temperature;
  return size > bound && size < HUGE_VAL ? std::copysign(bound, d_logp) : d_logp;
}

// `old` is the sampling policy's log-probability; pass `logp` itself if on-policy. Without a
// reference, has_ref is false and `ref` is ignored. `weight` multiplies the policy term.
template <class Real>
GAC_HOST_DEVICE TokenLoss<Real> rollout_loss(Real logp, Real entropy, Real advantage, Real old,
                                             bool has_ref, Real ref, const TokenSpec<Real>& spec,
                                             Real weight) {
  TokenLoss<Real> token;
  const Real log_ratio = logp - old;
  const bool overflows = log_ratio > kMaxLogRatio;  // the ratio is clamped and its gradient is 0
  const Real ratio = std::exp(overflows ? Real(kMaxLogRatio) : log_ratio);
  Real bounded = ratio < spec.ratio_low ? spec.ratio_low : ratio;
  bounded = bounded > spec.ratio_high ? spec.ratio_high : bounded;
  Real coefficient = advantage;  // of -logp
  switch (spec.policy) {
    case Policy::clip: {
      const Real free = ratio * advantage, bound = bounded * advantage;
      token.clipped = free > bound;
      token.loss = -(token.clipped ? bound : free);
      const Real ceiling = -spec.dual_clip * advantage;
      if (advantage < 0 && token.loss > ceiling) {
        token.loss = ceiling;
        token.clipped = true;
      }
      token.d_logp = token.clipped || overflows ? Real(0) : -free;
      break;
    }
    case Policy::sapo: {
      const Real tau = advantage > 0 ? spec.sapo_tau_positive : spec.sapo_tau_negative;
      const Real gate = 1 / (1 + std::exp(-tau * (ratio - 1)));
      token.loss = -4 / tau * gate * advantage;
      token.d_logp = overflows ? Real(0) : -4 * gate * (1 - gate) * ratio * advantage;
      break;
    }
    case Policy::cispo:
      token.clipped = bounded != ratio;
      coefficient *= bounded;
      [[fallthrough]];
    case Policy::reinforce:
      // 0 log 0 = 0, but nan stays
      token.loss = coefficient == 0 && logp == -HUGE_VAL ? Real(0) : -coefficient * logp;
      token.d_logp = -coefficient;
  }
  weigh(logp, weight, token);
  token.loss -= spec.entropy_coef * entropy;
  token.d_entropy = -spec.entropy_coef;
  if (has_ref) add_kl(logp, ref, ratio, overflows, spec, token);
  return token;
}

template <class Real>
GAC_HOST_DEVICE TokenLoss<Real> demo_loss(Real logp, Real advantage, const TokenSpec<Real>& spec,
                                          Real scale) {
  TokenLoss<Real> token;
  const Real p = std::exp(logp), c = spec.demo_shape;
  Real weight = 1;
  switch (spec.demo_weight) {
    case DemoWeight::one: break;
    case DemoWeight::p: weight = p; break;
    case DemoWeight::phi: weight = -p * std::expm1(logp); break;  // p (1 - p) without cancellation
    case DemoWeight::shaped:
      token.loss = -advantage * p / (p + c);
      token.d_logp = token.loss * (c / (p + c));
      weigh(logp, scale, token);
      return token;
    case DemoWeight::trust:
      token.loss = -p / (p < c ? c : p);
      token.d_logp = token.loss;
      weigh(logp, scale, token);
      return token;
  }
  token.loss = weight == 0 ? Real(0) : -weight * logp;  // 0 log 0 = 0
  token.d_logp = -weight;
  weigh(logp, scale, token);
  return token;
}

}  // namespace gac
