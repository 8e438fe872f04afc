// The sums of a row's softmax, and how those of two parts become those of both.
#pragma once

#include <cmath>

#include "../token_math.h"

namespace gac::cuda {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kFloor = -300.0f;  // 2^-300 is 0: stands for -inf where 0 * inf would be nan

// With t = (x - top) slope: mass = sum of 2^t, moment = sum of t 2^t. `top` is the largest logit, so
// the mass is at least 1 and nothing overflows. `target` is the target's logit in one part and 0 in
// all others.
struct alignas(16) Sums {
  float top, mass, moment, target;
};

GAC_HOST_DEVICE Sums no_sums() { return {-INFINITY, 0, 0, 0}; }

// `sums` told from the larger `top`; a part that is empty or all -inf has nothing to tell.
template <class Exp2>
GAC_HOST_DEVICE void raise(Sums& sums, float top, float slope, Exp2 exp2) {
  const float shift = fmaxf((sums.top - top) * slope, kFloor), factor = exp2(shift);
  sums.moment = (sums.moment + shift * sums.mass) * factor;
  sums.mass *= factor;
  sums.top = top;
}

// Adds `kCount` logits. A nan or +inf makes the mass nan for good; -inf adds nothing.
template <int kCount, class Exp2>
GAC_HOST_DEVICE void absorb(Sums& sums, const float (&x)[kCount], float slope, Exp2 exp2) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = fmaxf(largest, x[i]);
  if (largest > sums.top) raise(sums, largest, slope, exp2);
  const float anchor = sums.top == -INFINITY ? 0.0f : sums.top;
  float mass = 0, moment = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float t = (x[i] - anchor) * slope, power = exp2(t);
    mass += power;
    moment = fmaf(power, fmaxf(t, kFloor), moment);
  }
  sums.mass += mass;
  sums.moment += moment;
}

// Both told from the larger top, then added: symmetric, so that partners in a shuffle agree.
template <class Exp2>
GAC_HOST_DEVICE Sums merge(Sums a, Sums b, float slope, Exp2 exp2) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, a.mass + b.mass, a.moment + b.moment, a.target + b.target};
  raise(a, top, slope, exp2);
  raise(b, top, slope, exp2);
  return {top, a.mass + b.mass, a.moment + b.moment, a.target + b.target};
}

// What the gradient of a row is made of: out = 2^t (constant + linear t), and the target's own.
struct Pull {
  float top, constant, linear, target;
  int zero;  // the whole row is 0, whatever the logits hold
};

// One distribution, in nats; `bits` = log2 of the mass.
struct Statistics {
  float logp, entropy, lse, bits;
};

GAC_HOST_DEVICE Statistics statistics(const Sums& sums, float slope) {
  const float bits = log2f(sums.mass);
  return {((sums.target - sums.top) * slope - bits) * kLn2,
          (bits - sums.moment / sums.mass) * kLn2, fmaf(sums.top, slope, bits) * kLn2, bits};
}

// The gradient of d_logp logp + d_entropy entropy.
GAC_HOST_DEVICE Pull pull_of(const Sums& sums, const Statistics& s, float d_logp, float d_entropy,
                             float inverse_temperature) {
  const float unit = inverse_temperature / sums.mass;
  const float p = expf(s.logp);
  // 1 - p without cancelling; a target of probability 0 adds 0 log 0 = 0 to the entropy
  const float bend = p == 0 ? 0 : d_entropy * p * (s.logp + s.entropy);
  return {sums.top, (-d_logp - d_entropy * (s.entropy - s.bits * kLn2)) * unit,
          -d_entropy * kLn2 * unit, (-d_logp * expm1f(s.logp) - bend) * inverse_temperature,
          d_logp == 0 && d_entropy == 0};
}

}  // namespace gac::cuda
