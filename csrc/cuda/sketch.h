// The head sketch of a row's gradient (gac_kernels/sketch.py): k signed sums; vocabulary entry v is
// added to bucket v mod k. They are computed while the gradient is written, from its values before
// rounding.
//
// Between consecutive 16-byte words of a thread, v grows by a multiple of every supported k, so a
// thread keeps one sum per element of a word. At the end of the row, lanes with the same buckets
// add their sums, and each warp stores k sums, which torch.sum adds after the kernel: no warp waits
// for another.
#pragma once

#include "layout.h"

namespace gac::cuda {

constexpr int kMaxSketch = 64;

template <class In>
struct Sketch {
  static constexpr int kWidth = kWordBytes / sizeof(In);  // 4: only float32 logits are sketched
  static_assert(kConsumers * kWidth % kMaxSketch == 0 && kTileWords % kConsumers == 0);
  SignBytes signs;  // signs from word 0 on, at or before the row's first
  float sums[kWidth] = {};

  GAC_DEVICE Sketch(const Arguments& a, const Slice& s) : signs(a.signs - s.shift) {}

  // Adds 16-byte word q, which lies entirely in the row.
  GAC_DEVICE void add(int q, const float (&g)[kWidth]) {
    uint32_t packed[kWidth / 4];
    signs.load(q, packed);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[e] = fmaf(sign_of(packed[e / 4], e % 4), g[e], sums[e]);
  }

  // Adds the part of word q that belongs to the row.
  GAC_DEVICE void add(const Arguments& a, const Slice& s, int q, const float (&g)[kWidth]) {
    const Valid valid(s, q, kWidth, a.vocab);
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (valid(e)) sums[e] = fmaf(a.signs[int64_t(q) * kWidth - s.shift + e], g[e], sums[e]);
  }

  // Adds only vocabulary entry v; called by the thread that holds it.
  GAC_DEVICE void add(const Arguments& a, const Slice& s, int64_t v, float g) {
    const int element = static_cast<int>((v + s.shift) % kWidth);
    const float signed_g = a.signs[v] * g;
    // select the value, not the sum: a dynamic index would spill all sums to local memory
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[e] += e == element ? signed_g : 0.0f;
  }

  GAC_DEVICE void store(const Arguments& a, const Slice& s, int64_t n) {
    const int size = a.sketch, lane = thread() % 32;
    for (int step = 16; step > 0 && step * kWidth >= size; step /= 2) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += shuffle_xor(sums[e], step);
    }
    if (lane * kWidth >= size) return;
    const int first = (s.begin + thread()) * kWidth - s.shift;
    float* part = a.parts + ((n * cluster_size() + cluster_rank()) * kWarps + thread() / 32) * size;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) part[(first + e) & (size - 1)] = sums[e];
  }
};

// Address in the ring buffer of an element, given by its position from word 0; `start` is the
// slice's first tile.
template <class In>
GAC_DEVICE In* ring_element(const Arguments& a, char* ring, const Slice& s, Cursor start,
                            int64_t position) {
  const int bytes = static_cast<int>(position * sizeof(In)) - s.begin * kWordBytes;
  const int slot = (start.slot + bytes / kTileBytes) % a.slots;
  return reinterpret_cast<In*>(ring + slot * kTileBytes + bytes % kTileBytes);
}

}  // namespace gac::cuda
