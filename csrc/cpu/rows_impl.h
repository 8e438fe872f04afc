// The row kernels for the instruction set named by GAC_ISA; included by one file per instruction
// set.
#pragma once

#include <cfloat>
#include <cmath>

#include "rows.h"
#include "vec.h"

namespace gac::GAC_ISA {
namespace {

constexpr int64_t kBlock = 2048;  // logits that share a base: 8 KB of float32, a quarter of the L1
constexpr int64_t kRun = 512;     // logits per float32 sum: relative rounding error about 1e-7
constexpr int64_t kAhead = 3072;  // prefetch distance in logits, into the L1
constexpr int kUnroll = 2;        // with 16 registers, more would spill
constexpr int kMaxima = 4;        // independent chains: a maximum may have a latency of four cycles
constexpr int64_t kStep = kUnroll * kLanes;
constexpr double kLn2 = 0.693147180559945309417;

int64_t block_count(int64_t width) { return (width + kBlock - 1) / kBlock; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The scratch buffer holds the base of each block, then, aligned to a cache line, all powers.
int64_t bases_size(int64_t width) { return (block_count(width) + 15) / 16 * 16; }
int64_t scratch_size(int64_t width) { return bases_size(width) + width; }

// Exact near the base, however large the logits are. Clamped at `minimum`, whose power is 0, so
// that -inf gives 0 and not nan.
inline Floats distance(Floats x, Floats base, Floats minimum) { return max(minimum, x - base); }
inline Floats min_distance(float exp2_scale) {
  const float d = -127 / exp2_scale;
  return splat(d > -FLT_MAX ? d : -FLT_MAX);
}

// Reduces by halves: a serial chain over the lanes would take a tenth of the time that the block's
// exponentials take.
float max_lane(Floats v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(lanes));
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

double add_lanes(const Doubles& v) {
  double total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

template <class In>
float max_logit(const In* row, int64_t count) {
  Floats top[kMaxima];
  for (Floats& t : top) t = splat(-FLT_MAX);  // finite: -inf minus it stays -inf
  int64_t i = 0;
  for (; i + kMaxima * kLanes <= count; i += kMaxima * kLanes)
    for (int u = 0; u < kMaxima; ++u) top[u] = max(load(row + i + u * kLanes), top[u]);
  for (; i < count; i += kLanes) top[0] = max(load_partial(row + i, count - i), top[0]);
  return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

// Running sums per lane over the blocks so far: 2^(d exp2_scale) and d 2^(d exp2_scale), with
// d = x - base.
struct Running {
  float base = -FLT_MAX;
  Doubles sum = {}, dot = {}, squares = {}, total = {};

  void rescale(float to, float exp2_scale) {
    const double shift = double(base) - to, factor = std::exp(shift * exp2_scale * kLn2);
    dot = (dot + sum * shift) * factor;
    sum *= factor;
    squares *= factor * factor;
    base = to;
  }
};

// Adds a run to `all`, whose base is already set, and prefetches a later run into the L1.
// `powers` may be the row itself: a logit is read before its power is written.
template <bool kKeep, bool kMore, class In>
void accumulate(const In* row, int64_t count, float exp2_scale, float* powers, Running& all) {
  const Floats scales = splat(exp2_scale), base = splat(all.base), min_d = min_distance(exp2_scale);
  Floats sum = {}, dot = {}, squares = {}, total = {}, d[kUnroll];
  Exponent t[kUnroll];
  const auto start = [&](int u, Floats x) __attribute__((always_inline)) {
    if constexpr (kMore) total += x;
    d[u] = distance(x, base, min_d);
    t[u] = exponent(d[u], scales);
  };
  const auto add = [&](Floats power, Floats distance) __attribute__((always_inline)) {
    sum += power;
    dot += power * distance;
    if constexpr (kMore) squares += power * power;
  };
  // Software pipelining: the next vectors start before this step's are summed, because out-of-order
  // execution does not reach that far ahead.
  const auto step = [&](int64_t i, bool last) __attribute__((always_inline)) {
    Floats power[kUnroll], distance[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      power[u] = exp2(t[u]);
      distance[u] = d[u];
    }
    if (!last)
      for (int u = 0; u < kUnroll; ++u) start(u, load(row + i + kStep + u * kLanes));
    for (int u = 0; u < kUnroll; ++u) {
      add(power[u], distance[u]);
      if constexpr (kKeep) store(powers + i + u * kLanes, power[u]);
    }
  };
  int64_t i = 0;
  if (count >= kStep) {
    for (int u = 0; u < kUnroll; ++u) start(u, load(row + u * kLanes));
    for (const int64_t last = count - 2 * kStep; i <= last; i += kStep) {
      for (int64_t byte = 0; byte < int64_t(kStep * sizeof(In)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row + i + kAhead) + byte);
      step(i, false);
    }
    step(i, true);
    i += kStep;
  }
  const Floats full_total = total;
  for (; i < count; i += kLanes) {
    const Floats x = load_partial(row + i, count - i);
    start(0, x);
    const Floats power = exp2(t[0]);
    add(power, d[0]);
    if constexpr (kMore)
      for (int64_t j = 0; j < smaller(count - i, kLanes); ++j) all.total[j] += x[j];
    if constexpr (kKeep) store_partial(powers + i, power, smaller(count - i, kLanes));
  }
  all.sum += __builtin_convertvector(sum, Doubles);
  all.dot += __builtin_convertvector(dot, Doubles);
  if constexpr (kMore) {
    all.squares += __builtin_convertvector(squares, Doubles);
    all.total += __builtin_convertvector(full_total, Doubles);
  }
}

template <bool kKeep, bool kMore, class In>
RowSums sums(const In* row, int64_t width, float exp2_scale, float* bases, float* powers) {
  Running all;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t end = smaller(begin + kBlock, width);
    const float top = max_logit(row + begin, end - begin);
    if (top > all.base) all.rescale(top, exp2_scale);
    if constexpr (kKeep) bases[begin / kBlock] = all.base;
    for (int64_t i = begin; i < end; i += kRun)
      accumulate<kKeep, kMore>(row + i, smaller(kRun, end - i), exp2_scale, powers + i, all);
  }
  RowSums result{all.base, add_lanes(all.sum), add_lanes(all.dot) * exp2_scale};
  if constexpr (kMore) {
    result.squares = add_lanes(all.squares);
    result.total = add_lanes(all.total);
  }
  return result;
}

template <class In>
void cap(const In* row, int64_t width, float softcap, float* capped) {
  const Floats limit = splat(softcap), infinity = splat(__builtin_inff());
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = smaller(kLanes, width - i);
    const Floats x = count == kLanes ? load(row + i) : load_partial(row + i, count);
    const Floats bounded = limit * tanh(x / limit);
    store_partial(capped + i, x == infinity || x == -infinity ? x : bounded, count);
  }
}

template <bool kEntropy, bool kStream, bool kCap, class In, class Out>
void gradient(const In* row, Out* out, int64_t width, float exp2_scale, const RowSums& sums,
              RowGradient g, const float* bases, const float* powers) {
  const Floats scales = splat(exp2_scale), base = splat(sums.base);
  const Floats min_d = min_distance(exp2_scale), inverse_cap = splat(g.inverse_cap);
  float block_base = sums.base;
  double factor = 1;  // rescales from the block's base to the row's base
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    if (bases[begin / kBlock] != block_base) {
      block_base = bases[begin / kBlock];
      factor = std::exp((double(block_base) - sums.base) * exp2_scale * kLn2);
    }
    const Floats constant = splat(g.constant * factor), linear = splat(g.linear * factor);
    const auto value = [&](Floats x, Floats power) __attribute__((always_inline)) {
      Floats weight = constant;
      if constexpr (kEntropy) weight += linear * (distance(x, base, min_d) * scales);
      if constexpr (kCap) {
        const Floats share = x * inverse_cap;
        weight *= power == 0 ? splat(0) : 1 - share * share;  // no 0 * inf at a masked entry
      }
      return weight * power;
    };
    const auto full = [&](int64_t i) __attribute__((always_inline)) {
      return value(load(row + i), load(powers + i));
    };
    const auto partial = [&](int64_t i, int64_t count) {
      const Floats power = load_partial(powers + i, count);
      store_partial(out + i, value(load_partial(row + i, count), power), count);
    };
    const int64_t end = smaller(width, begin + kBlock);
    int64_t i = begin;
    if constexpr (kStream) {
      const int64_t head = smaller(end - i, to_alignment(out + i));
      if (head) partial(i, head);
      for (i += head; i + kLanes <= end; i += kLanes) stream(out + i, full(i));
    } else {
      for (; i + kLanes <= end; i += kLanes) store(out + i, full(i));
    }
    if (i < end) partial(i, end - i);
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

float get(Dtype dtype, const void* row, int64_t i) {
  return with_dtype(dtype, [=](auto in) {
    return load_partial(static_cast<const decltype(in)*>(row) + i, 1)[0];
  });
}

void set(Dtype dtype, void* row, int64_t i, float value) {
  with_dtype(dtype, [=](auto out) {
    store_partial(static_cast<decltype(out)*>(row) + i, splat(value), 1);
  });
}

RowSums dispatch_sums(Dtype dtype, const void* row, int64_t width, float exp2_scale, float* scratch,
                 float* powers, bool more) {
  return with_dtype(dtype, [=](auto in) {
    const auto* from = static_cast<const decltype(in)*>(row);
    if (more) return sums<false, true>(from, width, exp2_scale, nullptr, nullptr);
    if (!scratch) return sums<false, false>(from, width, exp2_scale, nullptr, nullptr);
    float* const stored = powers ? powers : scratch + bases_size(width);
    return sums<true, false>(from, width, exp2_scale, scratch, stored);
  });
}

bool reaches(Dtype dtype, const void* row, int64_t count, float value) {
  return with_dtype(dtype, [=](auto in) {
    return count > 0 && max_logit(static_cast<const decltype(in)*>(row), count) >= value;
  });
}

void dispatch_cap(Dtype dtype, const void* row, int64_t width, float softcap, float* capped) {
  with_dtype(dtype, [=](auto in) {
    cap(static_cast<const decltype(in)*>(row), width, softcap, capped);
  });
}

void dispatch_gradient(Dtype in_dtype, const void* row, Dtype out_dtype, void* out, int64_t width,
                       float exp2_scale, const RowSums& sums, RowGradient g, const float* scratch,
                       const float* powers, bool non_temporal) {
  if (!powers) powers = scratch + bases_size(width);
  if (g.inverse_cap != 0)
    return with_dtype(out_dtype, [&](auto result) {
      const auto* from = static_cast<const float*>(row);
      auto* to = static_cast<decltype(result)*>(out);
      gradient<true, false, true>(from, to, width, exp2_scale, sums, g, scratch, powers);
    });
  with_dtype(in_dtype, [&](auto in) {
    with_dtype(out_dtype, [&](auto result) {
      const auto* from = static_cast<const decltype(in)*>(row);
      auto* to = static_cast<decltype(result)*>(out);
      if constexpr (sizeof(result) == sizeof(float)) {
        if (non_temporal && g.linear == 0)
          return gradient<false, true, false>(from, to, width, exp2_scale, sums, g, scratch, powers);
        if (non_temporal)
          return gradient<true, true, false>(from, to, width, exp2_scale, sums, g, scratch, powers);
      }
      if (g.linear == 0)
        return gradient<false, false, false>(from, to, width, exp2_scale, sums, g, scratch, powers);
      return gradient<true, false, false>(from, to, width, exp2_scale, sums, g, scratch, powers);
    });
  });
}

}  // namespace

extern const RowKernels kernels{GAC_ISA_NAME, get,          set,
                                scratch_size, dispatch_sums, reaches,
                                dispatch_cap, dispatch_gradient};

}  // namespace gac::GAC_ISA
