// Measures what limits the in-place row kernels on a CPU: the same rows with and without the
// exponential.
//
//   g++ -std=c++20 -O3 -ffp-contract=fast -mavx512f -mfma -Icsrc/cpu bench/row_limit.cpp -o limit
//   g++ -DWITHOUT_EXP (the same) -o limit_without && ./limit && ./limit_without
//
// Prints picoseconds of CPU time per float32 logit, the minimum of seven rounds over 1024 rows.
#define GAC_ISA avx512
#define GAC_ISA_NAME "avx512"
#ifdef WITHOUT_EXP
#define exp2 power_of_two
#include "vec.h"
#undef exp2
namespace gac::avx512 {
namespace {
inline Floats exp2(Exponent t) { return t.n + t.f; }  // reads the same inputs as the real one
}  // namespace
}  // namespace gac::avx512
#endif
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <random>
#include <vector>

#include "rows_impl.h"

using namespace gac;
using namespace gac::avx512;

namespace {

constexpr int64_t kWidth = 32000, kRows = 1024;
volatile double sink;

double seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

template <class Before, class F>
double min_time(Before before, F f) {
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    before();
    const double start = seconds();
    for (int64_t i = 0; i < kRows; ++i) f(i);
    best = std::min(best, seconds() - start);
  }
  return 1e12 * best / (kWidth * kRows);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(kWidth), rows(kWidth * kRows), scratch(scratch_size(kWidth));
  for (float& x : logits) x = normal(random);
  const auto fill = [&] {
    for (int64_t i = 0; i < kRows; ++i)
      std::copy(logits.begin(), logits.end(), rows.begin() + i * kWidth);
  };
  const auto in_place = [&](float* row) {
    const float exp2_scale = 1.442695f;
    const RowSums s = dispatch_sums(Dtype::float32, row, kWidth, exp2_scale, scratch.data(), row);
    dispatch_gradient(Dtype::float32, row, Dtype::float32, row, kWidth, exp2_scale, s, {1e-9, 0},
                 scratch.data(), row, false);
    sink = s.sum;
  };
  std::vector<float> cached(kWidth);
  const auto copy = [&](int64_t) {
    std::copy(logits.begin(), logits.end(), cached.begin());
    sink = cached[7];
  };
  const auto nothing = [] {};
  const double memory = min_time(fill, [&](int64_t i) { in_place(&rows[i * kWidth]); });
  const double copied = min_time(nothing, copy);
  const double both = min_time(nothing, [&](int64_t i) {
    copy(i);
    in_place(cached.data());
  });
  const double scaled = min_time(fill, [&](int64_t i) {
    for (int64_t j = 0; j < kWidth; ++j) rows[i * kWidth + j] *= 1.001f;
    sink = rows[i * kWidth];
  });
  std::printf("in place %.0f, from cache %.0f; one read and write of memory %.0f\n",
              memory, both - copied, scaled);
}
