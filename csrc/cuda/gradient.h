// The second pass: writes the gradient of a slice held in shared memory, or zeros for skipped rows.
#pragma once

#include "layout.h"

namespace gac::cuda {

// The output row of a gradient.
template <class Out, int kWidth>
struct Destination {
  static constexpr int kBytes = kWidth * sizeof(Out);  // of a word's gradient
  static_assert(kBytes <= kWordBytes);
  Out* row;
  char* words;   // address of word 0, at or before the start of the row
  bool aligned;  // whole words can be written with wide stores

  GAC_DEVICE Destination(const Arguments& a, const Slice& s, int64_t n) {
    row = static_cast<Out*>(a.out) + n / a.per_batch * a.out_batch_stride +
          n % a.per_batch * a.out_row_stride;
    words = reinterpret_cast<char*>(row) - s.shift * sizeof(Out);
    aligned = reinterpret_cast<uintptr_t>(words) % kBytes == 0;
  }

  // Stores all of word q of an aligned row.
  GAC_DEVICE void store(int q, const float (&g)[kWidth]) const {
    uint32_t packed[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(Out) == 4)
        packed[i] = bits_of(g[i]);
      else
        packed[i] = pack(g[2 * i], g[2 * i + 1], Out{});
    }
    store_bytes<kBytes>(words + int64_t(q) * kBytes, packed);
  }

  // Stores the part of word q that belongs to the row, for any word and alignment.
  GAC_DEVICE void store(const Slice& s, int q, int64_t vocab, const float (&g)[kWidth]) const {
    if (aligned && q >= s.inner && q < s.outer) return store(q, g);
    const Valid valid(s, q, kWidth, vocab);
    const int64_t first = int64_t(q) * kWidth - s.shift;
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (valid(e)) row[first + e] = from_float<Out>(g[e]);
  }
};

template <class In, class Out>
GAC_DEVICE void write_zeros(const Arguments& a, const Slice& s, int64_t n) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  const Destination<Out, kWidth> to(a, s, n);
  const float zeros[kWidth] = {};
  for (int q = s.begin + thread(); q < s.end; q += kConsumers) to.store(s, q, a.vocab, zeros);
}

// The gradient of the logits in a word. kLinear: it has an entropy term; kMaybeSteep: the logits
// may be steep (see row_sums.h).
template <bool kLinear, bool kMaybeSteep, class In, int kWidth>
GAC_DEVICE void word_gradient(const char* word, const GradientTerms& terms, float exp2_scale,
                              float (&g)[kWidth]) {
  float x[kWidth];
  unpack(load_word(word), x, In{});
  const float anchor = anchor_of(terms.top, exp2_scale);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const float t = kMaybeSteep ? exponent(x[e], terms.top, exp2_scale)
                                : fmaf(x[e], exp2_scale, -anchor);
    g[e] = Exp2{}(t) * (kLinear ? fmaf(terms.linear, fmaxf(t, kFloor), terms.constant)
                                : terms.constant);
  }
}

// Second pass: writes the gradient of the slice whose first tile is at `at`.
template <bool kLinear, class In, class Out>
GAC_DEVICE void write_slice(const Arguments& a, Shared& shared, char* ring, const Slice& s,
                            Cursor at, int64_t n) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  const GradientTerms terms = shared.gradient;
  const Destination<Out, kWidth> to(a, s, n);
  const bool fast = to.aligned && !is_steep(anchor_of(terms.top, a.exp2_scale));
  for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots)) {
    const char* thread_words = ring + at.slot * kTileBytes + thread() * kWordBytes;
    float g[kWidth];
    if (fast && s.covers(first)) {
#pragma unroll
      for (int u = 0; u < kPerThread; ++u) {
        const char* word = thread_words + u * kConsumers * kWordBytes;
        word_gradient<kLinear, false, In>(word, terms, a.exp2_scale, g);
        to.store(first + thread() + u * kConsumers, g);
      }
    } else {
      for (int u = 0; u < kPerThread; ++u) {
        const int q = first + thread() + u * kConsumers;
        if (q >= s.end) break;
        const char* word = thread_words + u * kConsumers * kWordBytes;
        word_gradient<kLinear, true, In>(word, terms, a.exp2_scale, g);
        to.store(s, q, a.vocab, g);
      }
    }
    release(shared.empty[at.slot]);
  }
  const int64_t q = (terms.target_index + s.shift) / kWidth;
  const bool here = terms.target_index >= 0 && q >= s.begin && q < s.end;
  if (here && (q - s.begin) % kConsumers == thread())  // it has just stored another value there
    to.row[terms.target_index] = from_float<Out>(terms.target);
}

// For a row whose gradient is 0: writes zeros and releases its tiles.
template <class In, class Out>
GAC_DEVICE void skip_slice(const Arguments& a, Shared& shared, const Slice& s, Cursor at,
                           int64_t n) {
  write_zeros<In, Out>(a, s, n);
  for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots))
    release(shared.empty[at.slot]);
}

}  // namespace gac::cuda
