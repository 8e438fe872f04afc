// Parallel loops on torch's OpenMP threads.
//
// The library is compiled with OpenMP but not linked to a runtime: its symbols resolve to the
// runtime that torch has loaded, so that both share one pool of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace gac {

// Calls f(begin, end) for parts of [0, count), on at most `threads` threads, each with at least
// `grain` items. The OpenMP team always has `threads` members: a smaller team would end the other
// threads, and torch would have to start them again.
template <class F>
void parallel_for(int64_t count, int64_t grain, int64_t threads, const F& f) {
  if (count <= grain || threads <= 1 || omp_in_parallel()) return f(int64_t(0), count);
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t parts = std::min<int64_t>(omp_get_num_threads(), (count + grain - 1) / grain);
    const int64_t size = (count + parts - 1) / parts, begin = omp_get_thread_num() * size;
    if (begin < count) f(begin, std::min(count, begin + size));
  }
}

}  // namespace gac
