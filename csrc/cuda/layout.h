// The layout of a block's shared memory, and the words of a row that the block owns.
//
// Rows need no alignment: 16-byte words are counted from the aligned address at or before the row's
// first logit, and elements outside the row in the first and last words are ignored. (Reading an
// aligned word is safe if one of its bytes is valid.)
#pragma once

#include "arguments.h"
#if defined(__CUDACC__)
#include "hopper.h"
#else
#include "emulated.h"
#endif

namespace gac::cuda {

constexpr int64_t kIgnore = -100;
constexpr int kWarps = 8, kConsumers = 32 * kWarps, kThreads = kConsumers + 32;
constexpr int kWordBytes = 16, kTileBytes = 8192, kTileWords = kTileBytes / kWordBytes;
constexpr int kPerThread = kTileWords / kConsumers;
constexpr int kMaxSlots = 28, kMaxCluster = 8, kHeaderBytes = 1024;

// The start of a block's shared memory; the ring buffer starts at kHeaderBytes.
struct Shared {
  Sums inbox[2][kMaxCluster];  // indexed by row parity and sender rank
  Sums partial[kWarps];
  GradientTerms gradient;
  Barrier full[kMaxSlots], empty[kMaxSlots], exchange[2];
};
static_assert(sizeof(Shared) <= kHeaderBytes);

// A position in the ring buffer, and the parity of the barrier phase that fills it.
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  GAC_DEVICE void next(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// The words [begin, end) of a row that this block holds. The first logit of the row is element
// `shift` of word 0; all elements of the words [inner, outer) belong to the row.
struct Slice {
  const char* base;
  int shift, begin, end, inner, outer;
  // Whether the tile that starts at word `first` lies within the row.
  GAC_DEVICE bool covers(int first) const {
    return first >= inner && first + kTileWords <= outer;
  }
};

template <class In>
GAC_DEVICE Slice slice_of(const Arguments& a, int64_t n) {
  const In* row = static_cast<const In*>(a.logits) + n / a.per_batch * a.batch_stride +
                  n % a.per_batch * a.row_stride;
  const auto bytes = reinterpret_cast<uintptr_t>(row) % kWordBytes;
  Slice s;
  s.base = reinterpret_cast<const char*>(row) - bytes;
  s.shift = static_cast<int>(bytes / sizeof(In));
  constexpr int kWidth = kWordBytes / sizeof(In);
  const int words = static_cast<int>((s.shift + a.vocab + kWidth - 1) / kWidth);
  const int full_words = static_cast<int>((s.shift + a.vocab) / kWidth);
  const int per_block = (words + cluster_size() - 1) / cluster_size();
  s.begin = per_block * cluster_rank() < words ? per_block * cluster_rank() : words;
  s.end = s.begin + per_block < words ? s.begin + per_block : words;
  s.inner = s.begin == 0 && s.shift > 0 ? 1 : s.begin;
  s.outer = s.end < full_words ? s.end : full_words;
  return s;
}

// The elements [begin, end) of word q that are logits of the row.
struct Valid {
  int begin, end;
  GAC_DEVICE Valid(const Slice& s, int q, int width, int64_t vocab) {
    const int64_t first = int64_t(q) * width - s.shift;
    begin = first < 0 ? static_cast<int>(-first) : 0;
    end = vocab - first < width ? static_cast<int>(vocab - first) : width;
  }
  GAC_DEVICE bool operator()(int e) const { return e >= begin && e < end; }
};

// Call after this warp's last use of a tile.
GAC_DEVICE void release(Barrier& empty) {
  sync_warp();
  if (thread() % 32 == 0) arrive(empty);
}

}  // namespace gac::cuda
