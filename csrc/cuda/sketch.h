// The head sketch of a row's gradient (gac_kernels/sketch.py): k signed sums, word v adds to number
// v modulo k. They are taken while the gradient is written, of its values before they are rounded.
//
// From one of a thread's words of 16 bytes to its next, v grows by a multiple of every k, so a
// thread keeps one sum for each element of a word. At the end of the row the lanes of the same
// buckets add theirs, and each warp stores k sums for the host to add: no warp waits for another.
#pragma once

#include "layout.h"

namespace gac::cuda {

constexpr int kMaxSketch = 64;

template <class In>
struct Sketch {
  static constexpr int kWidth = kWordBytes / sizeof(In);
  static_assert(kConsumers * kWidth % kMaxSketch == 0 && kTileWords % kConsumers == 0);
  Bytes signs;  // of word 0, at or before the first
  float sums[kWidth] = {};

  GAC_DEVICE Sketch(const Arguments& a, const Slice& s) : signs(a.signs - s.shift) {}

  // Word q of 16 bytes, all of it the row's.
  GAC_DEVICE void add(int q, const float (&g)[kWidth]) {
    uint32_t four[kWidth / 4];
    signs.load(q, four);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[e] = fmaf(sign_of(four[e / 4], e % 4), g[e], sums[e]);
  }

  // What is the row's of any word.
  GAC_DEVICE void add(const Arguments& a, const Slice& s, int q, const float (&g)[kWidth]) {
    const Valid valid(s, q, kWidth, a.vocab);
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (valid(e)) sums[e] = fmaf(a.signs[int64_t(q) * kWidth - s.shift + e], g[e], sums[e]);
  }

  // Word v alone, by the thread that holds it.
  GAC_DEVICE void add(const Arguments& a, const Slice& s, int64_t v, float g) {
    const int place = static_cast<int>((v + s.shift) % kWidth);
    const float signed_g = a.signs[v] * g;
    // a choice of the value, not of the sum: an index that varies would put all sums in memory
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[e] += e == place ? signed_g : 0.0f;
  }

  GAC_DEVICE void store(const Arguments& a, const Slice& s, int64_t n) {
    const int size = a.sketch, lane = thread() % 32;
    for (int step = 16; step > 0 && step * kWidth >= size; step /= 2) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += shuffle_xor(sums[e], step);
    }
    if (size < kWidth) {  // 4 buckets and words of 8
#pragma unroll
      for (int e = 0; e < kWidth / 2; ++e) sums[e] += sums[e + kWidth / 2];
    }
    if (lane * kWidth >= size) return;
    const int first = (s.begin + thread()) * kWidth - s.shift;
    float* part = a.parts + ((n * cluster_size() + cluster_rank()) * kWarps + thread() / 32) * size;
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (e < size) part[(first + e) & (size - 1)] = sums[e];
  }
};

// Where element `place` of the row, counted from word 0, is in the ring; `start`: the slice's first
// tile.
template <class In>
GAC_DEVICE In* held(const Arguments& a, char* ring, const Slice& s, Cursor start, int64_t place) {
  const int bytes = static_cast<int>(place * sizeof(In)) - s.begin * kWordBytes;
  const int slot = (start.slot + bytes / kTileBytes) % a.slots;
  return reinterpret_cast<In*>(ring + slot * kTileBytes + bytes % kTileBytes);
}

}  // namespace gac::cuda
