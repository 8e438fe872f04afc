// The sums of a row's softmax, and how those of two parts become those of both.
#pragma once

#include <cfloat>
#include <cmath>

#include "../token_math.h"

namespace gac::cuda {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kFloor = -300.0f;  // 2^-300 is 0: stands for -inf where 0 * inf would be nan

constexpr float kSteep = 65536.0f;

// Where exponents are counted from: the largest logit times slope, as rounded. What the rounding lost
// is the same in every term, and small beside 1 unless the logits are steep.
GAC_HOST_DEVICE float anchor_of(float top, float slope) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(top, slope);  // never part of a fused operation
#else
  return top * slope;
#endif
}
GAC_HOST_DEVICE bool is_steep(float anchor) { return !(fabsf(anchor) < kSteep); }

// The exponent of 2 of a logit: one fused operation, or for steep logits two that lose nothing at the
// top, so that logits up to the largest float work.
GAC_HOST_DEVICE float exponent(float x, float top, float slope) {
  const float anchor = anchor_of(top, slope);
  return is_steep(anchor) ? (x - top) * slope : fmaf(x, slope, -anchor);
}

// With t the exponents: mass = sum of 2^t, moment = sum of t 2^t. `top` is the largest logit, so
// nothing overflows. `target` is the target's logit in one part and 0 in all others.
struct alignas(16) Sums {
  float top, mass, moment, target;
};

GAC_HOST_DEVICE Sums no_sums() { return {-FLT_MAX, 0, 0, 0}; }

// `sums` told from the larger `top`.
template <class Exp2>
GAC_HOST_DEVICE void raise(Sums& sums, float top, float slope, Exp2 exp2) {
  const float from = anchor_of(sums.top, slope), to = anchor_of(top, slope);
  const float gap = is_steep(from) || is_steep(to) ? (sums.top - top) * slope : from - to;
  const float shift = fmaxf(gap, kFloor), factor = exp2(shift);
  sums.moment = (sums.moment + shift * sums.mass) * factor;
  sums.mass *= factor;
  sums.top = top;
}

// Adds the logits of `kWords` words, of which `largest` is the largest. A nan or +inf makes the mass
// nan for good; -inf adds nothing.
template <int kWords, int kWidth, class Exp2>
GAC_HOST_DEVICE void absorb(Sums& sums, const float (&x)[kWords][kWidth], float largest,
                            float slope, Exp2 exp2) {
  if (largest > sums.top) raise(sums, largest, slope, exp2);
  const float anchor = anchor_of(sums.top, slope);
  float mass = 0, moment = 0;
  const auto add = [&](float t) {
    const float power = exp2(t);
    mass += power;
    moment = fmaf(power, fmaxf(t, kFloor), moment);
  };
  if (is_steep(anchor)) {
#pragma unroll
    for (int i = 0; i < kWords * kWidth; ++i) add((x[i / kWidth][i % kWidth] - sums.top) * slope);
  } else {
#pragma unroll
    for (int i = 0; i < kWords * kWidth; ++i) add(fmaf(x[i / kWidth][i % kWidth], slope, -anchor));
  }
  sums.mass += mass;
  sums.moment += moment;
}

// Both told from the larger top, then added: symmetric, so that partners in a shuffle agree.
template <class Exp2>
GAC_HOST_DEVICE Sums merge(Sums a, Sums b, float slope, Exp2 exp2) {
  const float top = fmaxf(a.top, b.top);
  raise(a, top, slope, exp2);
  raise(b, top, slope, exp2);
  return {top, a.mass + b.mass, a.moment + b.moment, a.target + b.target};
}

// What the gradient of a row is made of: out = 2^t (constant + linear t), and the target's own.
struct Pull {
  float top, constant, linear, target;
  int64_t word;  // the target, -1 where it is none of the row's words
  bool zero;     // the whole row is 0, whatever the logits hold
};

// One distribution, in nats; `bits` = log2 of the mass.
struct Statistics {
  float logp, entropy, lse, bits;
};

GAC_HOST_DEVICE Statistics statistics(const Sums& sums, float slope) {
  const float bits = log2f(sums.mass);
  const float logp = (exponent(sums.target, sums.top, slope) - bits) * kLn2;
  const float entropy = (bits - sums.moment / sums.mass) * kLn2;
  // rounding may pass 0 where one word has all the mass; a nan stays
  return {logp > 0 ? 0 : logp, entropy < 0 ? 0 : entropy, (anchor_of(sums.top, slope) + bits) * kLn2, bits};
}

// The gradient of d_logp logp + d_entropy entropy.
GAC_HOST_DEVICE Pull pull_of(const Sums& sums, const Statistics& s, int64_t word, float d_logp,
                             float d_entropy, float inverse_temperature) {
  const float unit = inverse_temperature / sums.mass;
  const float p = expf(s.logp);
  // 1 - p without cancelling; a target of probability 0 adds 0 log 0 = 0 to the entropy
  const float bend = p == 0 ? 0 : d_entropy * p * (s.logp + s.entropy);
  return {sums.top, (-d_logp - d_entropy * (s.entropy - s.bits * kLn2)) * unit,
          -d_entropy * kLn2 * unit, (-d_logp * expm1f(s.logp) - bend) * inverse_temperature,
          word, d_logp == 0 && d_entropy == 0};
}

}  // namespace gac::cuda
