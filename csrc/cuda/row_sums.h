// The softmax sums of a row, and how to merge the sums of two parts.
#pragma once

#include <cfloat>
#include <cmath>

#include "../token_math.h"

namespace gac::cuda {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kFloor = -300.0f;  // 2^-300 is 0: replaces -inf, because 0 * inf would be nan

constexpr float kSteep = 65536.0f;

// The origin of the exponents: the largest logit times exp2_scale, rounded. The rounding error is
// the same in every term, and small compared with 1 unless the logits are steep.
GAC_HOST_DEVICE float anchor_of(float top, float exp2_scale) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(top, exp2_scale);  // must not be fused into an FMA
#else
  return top * exp2_scale;
#endif
}
GAC_HOST_DEVICE bool is_steep(float anchor) { return !(fabsf(anchor) < kSteep); }

// The base-2 exponent of a logit: one FMA or, for steep logits, two operations that are exact at
// the maximum, so that logits up to the largest float work.
GAC_HOST_DEVICE float exponent(float x, float top, float exp2_scale) {
  const float anchor = anchor_of(top, exp2_scale);
  return is_steep(anchor) ? (x - top) * exp2_scale : fmaf(x, exp2_scale, -anchor);
}

// With t the exponents: mass = sum of 2^t, moment = sum of t 2^t. `top` is the largest logit, so
// nothing overflows. `target` is the target's logit in one part and 0 in all others.
struct alignas(16) Sums {
  float top, mass, moment, target;
};

GAC_HOST_DEVICE Sums empty_sums() { return {-FLT_MAX, 0, 0, 0}; }

// Rescales `sums` to the larger maximum `top`.
template <class Exp2>
GAC_HOST_DEVICE void rescale(Sums& sums, float top, float exp2_scale, Exp2 exp2) {
  const float from = anchor_of(sums.top, exp2_scale), to = anchor_of(top, exp2_scale);
  const float gap = is_steep(from) || is_steep(to) ? (sums.top - top) * exp2_scale : from - to;
  const float shift = fmaxf(gap, kFloor), factor = exp2(shift);
  sums.moment = (sums.moment + shift * sums.mass) * factor;
  sums.mass *= factor;
  sums.top = top;
}

// Adds the logits of `kWords` words; `largest` is their maximum. A nan or +inf makes the mass nan
// permanently; -inf adds nothing.
template <int kWords, int kWidth, class Exp2>
GAC_HOST_DEVICE void absorb(Sums& sums, const float (&x)[kWords][kWidth], float largest,
                            float exp2_scale, Exp2 exp2) {
  if (largest > sums.top) rescale(sums, largest, exp2_scale, exp2);
  const float anchor = anchor_of(sums.top, exp2_scale);
  float mass = 0, moment = 0;
  const auto add = [&](float t) {
    const float power = exp2(t);
    mass += power;
    moment = fmaf(power, fmaxf(t, kFloor), moment);
  };
  if (is_steep(anchor)) {
#pragma unroll
    for (int i = 0; i < kWords * kWidth; ++i)
      add((x[i / kWidth][i % kWidth] - sums.top) * exp2_scale);
  } else {
#pragma unroll
    for (int i = 0; i < kWords * kWidth; ++i)
      add(fmaf(x[i / kWidth][i % kWidth], exp2_scale, -anchor));
  }
  sums.mass += mass;
  sums.moment += moment;
}

// Rescales both to the larger maximum and adds them. Symmetric, so that both lanes of a shuffle get
// the same result.
template <class Exp2>
GAC_HOST_DEVICE Sums merge(Sums a, Sums b, float exp2_scale, Exp2 exp2) {
  const float top = fmaxf(a.top, b.top);
  rescale(a, top, exp2_scale, exp2);
  rescale(b, top, exp2_scale, exp2);
  return {top, a.mass + b.mass, a.moment + b.moment, a.target + b.target};
}

// The coefficients of a row's gradient, out = 2^t (constant + linear t), and the target's gradient.
struct GradientTerms {
  float top, constant, linear, target;
  int64_t target_index;  // index of the target in the row, or -1
  bool zero;     // the gradient of the whole row is 0, whatever the logits
};

// Statistics of one distribution, in nats except log2_mass, which is log2 of the mass.
struct Statistics {
  float logp, entropy, lse, log2_mass;
};

GAC_HOST_DEVICE Statistics statistics(const Sums& sums, float exp2_scale) {
  const float log2_mass = log2f(sums.mass);
  const float logp = (exponent(sums.target, sums.top, exp2_scale) - log2_mass) * kLn2;
  const float entropy = (log2_mass - sums.moment / sums.mass) * kLn2;
  // rounding may cross 0 if one token has all the mass; nan is kept
  return {logp > 0 ? 0 : logp, entropy < 0 ? 0 : entropy,
          (anchor_of(sums.top, exp2_scale) + log2_mass) * kLn2, log2_mass};
}

// The gradient of d_logp logp + d_entropy entropy.
GAC_HOST_DEVICE GradientTerms gradient_terms(const Sums& sums, const Statistics& s,
                                             int64_t target_index, float d_logp, float d_entropy,
                                             float inverse_temperature) {
  const float per_power = inverse_temperature / sums.mass;
  const float p = expf(s.logp);
  // 1 - p without cancellation; a target of probability 0 adds 0 log 0 = 0 to the entropy
  const float entropy_part = p == 0 ? 0 : d_entropy * p * (s.logp + s.entropy);
  return {sums.top, (-d_logp - d_entropy * (s.entropy - s.log2_mass * kLn2)) * per_power,
          -d_entropy * kLn2 * per_power,
          (-d_logp * expm1f(s.logp) - entropy_part) * inverse_temperature, target_index,
          d_logp == 0 && d_entropy == 0};
}

}  // namespace gac::cuda
