// The row kernels, for the instruction set that GAC_ISA names. Included by one file per set.
#pragma once

#include <cfloat>
#include <cmath>

#include "rows.h"
#include "vec.h"

namespace gac::GAC_ISA {
namespace {

constexpr int64_t kBlock = 2048;  // logits that share a base: 8 KB of float32, a quarter of the L1
constexpr int kUnroll = 2;        // with 16 registers, more would spill
constexpr int kMaxima = 4;        // independent chains: one maximum takes two cycles
constexpr int64_t kStep = kUnroll * kLanes;
constexpr double kLn2 = 0.693147180559945309417;

int64_t blocks(int64_t width) { return (width + kBlock - 1) / kBlock; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The scratch holds the base of each block, then, from a cache line on, the powers of all.
int64_t bases_size(int64_t width) { return (blocks(width) + 15) / 16 * 16; }
int64_t scratch_size(int64_t width) { return bases_size(width) + width; }

// Subtracting first is exact near the base, however large the logits are. A -inf logit gets the
// power 0, not nan.
inline Floats exponent(Floats x, Floats base, Floats slope) {
  return max(splat(-127.0f), (x - base) * slope);
}

double add_lanes(const Floats (&parts)[kUnroll]) {
  float lanes[kStep];
  std::memcpy(lanes, parts, sizeof(lanes));
  double total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

template <class In>
float largest(const In* row, int64_t count) {
  Floats top[kMaxima];
  for (Floats& t : top) t = splat(-FLT_MAX);  // finite: -inf minus it stays -inf
  int64_t i = 0;
  for (; i + kMaxima * kLanes <= count; i += kMaxima * kLanes)
    for (int u = 0; u < kMaxima; ++u) top[u] = max(load(row + i + u * kLanes), top[u]);
  for (; i < count; i += kLanes) top[0] = max(load_some(row + i, count - i), top[0]);
  float lanes[kMaxima * kLanes], result = -FLT_MAX;
  std::memcpy(lanes, top, sizeof(lanes));
  for (float lane : lanes) result = lane > result ? lane : result;
  return result;
}

// Adds one block to `all`, whose base is set, and fetches the block that follows into the L1.
// `powers` may be the row itself: a logit is read before its power is written.
template <bool kKeep, class In>
void accumulate(const In* row, int64_t count, float slope, float* powers, RowSums& all) {
  const Floats slopes = splat(slope), base = splat(all.base);
  Floats sums[kUnroll] = {}, dots[kUnroll] = {};
  const auto add = [&](int u, Floats x) __attribute__((always_inline)) {
    const Floats t = exponent(x, base, slopes);
    const Floats power = exp2(t);
    sums[u] += power;
    dots[u] += power * t;
    return power;
  };
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int64_t byte = 0; byte < int64_t(kStep * sizeof(In)); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(row + i + kBlock) + byte);
    for (int u = 0; u < kUnroll; ++u) {
      const Floats power = add(u, load(row + i + u * kLanes));
      if constexpr (kKeep) store(powers + i + u * kLanes, power);
    }
  }
  for (; i < count; i += kLanes) {
    const Floats power = add(0, load_some(row + i, count - i));
    if constexpr (kKeep) store_some(powers + i, power, least(count - i, kLanes));
  }
  all.sum += add_lanes(sums);
  all.dot += add_lanes(dots);
}

template <bool kKeep, class In>
RowSums sums(const In* row, int64_t width, float slope, float* bases, float* powers) {
  RowSums all{-FLT_MAX, 0, 0};
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = least(kBlock, width - begin);
    const float top = largest(row + begin, count);
    if (top > all.base) {  // what was summed so far is told from the new base
      const double shift = (double(all.base) - top) * slope, factor = std::exp(shift * kLn2);
      all.dot = (all.dot + all.sum * shift) * factor;
      all.sum *= factor;
      all.base = top;
    }
    if constexpr (kKeep) bases[begin / kBlock] = all.base;
    accumulate<kKeep>(row + begin, count, slope, powers + begin, all);
  }
  // A nan logit is sure to be seen in `dot` only; a row of -inf has no distribution either.
  if (all.dot != all.dot || all.sum == 0) all.sum = NAN;
  return all;
}

template <bool kEntropy, bool kStream, class In, class Out>
void gradient(const In* row, Out* out, int64_t width, float slope, const RowSums& sums,
              RowGradient g, const float* bases, const float* powers) {
  const Floats slopes = splat(slope), base = splat(sums.base);
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const double shift = (double(bases[begin / kBlock]) - sums.base) * slope;
    const double factor = std::exp(shift * kLn2);
    const Floats constant = splat(g.constant * factor), linear = splat(g.linear * factor);
    const auto value = [&](Floats x, Floats power) __attribute__((always_inline)) {
      Floats weight = constant;
      if constexpr (kEntropy) weight += linear * exponent(x, base, slopes);
      return weight * power;
    };
    const auto whole = [&](int64_t i) __attribute__((always_inline)) {
      return value(load(row + i), load(powers + i));
    };
    const auto some = [&](int64_t i, int64_t count) {
      store_some(out + i, value(load_some(row + i, count), load_some(powers + i, count)), count);
    };
    const int64_t end = least(width, begin + kBlock);
    int64_t i = begin;
    if constexpr (kStream) {
      const int64_t head = least(end - i, to_alignment(out + i));
      if (head) some(i, head);
      for (i += head; i + kLanes <= end; i += kLanes) stream(out + i, whole(i));
    } else {
      for (; i + kLanes <= end; i += kLanes) store(out + i, whole(i));
    }
    if (i < end) some(i, end - i);
  }
  if constexpr (kStream) finish_streams();
}

template <class F>
auto with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::bfloat16: return f(BFloat16{});
    case Dtype::float16: return f(Float16{});
    default: return f(float{});
  }
}

RowSums any_sums(Dtype dtype, const void* row, int64_t width, float slope, float* scratch,
                 float* powers) {
  return with_dtype(dtype, [=](auto in) {
    const auto* from = static_cast<const decltype(in)*>(row);
    if (!scratch) return sums<false>(from, width, slope, nullptr, nullptr);
    return sums<true>(from, width, slope, scratch, powers ? powers : scratch + bases_size(width));
  });
}

void any_gradient(Dtype in_dtype, const void* row, Dtype out_dtype, void* out, int64_t width,
                  float slope, const RowSums& sums, RowGradient g, const float* scratch,
                  const float* powers, bool to_memory) {
  if (!powers) powers = scratch + bases_size(width);
  with_dtype(in_dtype, [&](auto in) {
    with_dtype(out_dtype, [&](auto result) {
      const auto* from = static_cast<const decltype(in)*>(row);
      auto* to = static_cast<decltype(result)*>(out);
      if constexpr (sizeof(result) == sizeof(float)) {
        if (to_memory && g.linear == 0)
          return gradient<false, true>(from, to, width, slope, sums, g, scratch, powers);
        if (to_memory) return gradient<true, true>(from, to, width, slope, sums, g, scratch, powers);
      }
      if (g.linear == 0)
        return gradient<false, false>(from, to, width, slope, sums, g, scratch, powers);
      return gradient<true, false>(from, to, width, slope, sums, g, scratch, powers);
    });
  });
}

}  // namespace

extern const RowKernels kernels{GAC_ISA_NAME, scratch_size, any_sums, any_gradient};

}  // namespace gac::GAC_ISA
