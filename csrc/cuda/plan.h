// The launch configuration, chosen on the host.
#pragma once

#include <algorithm>  // min, clamp

#include "layout.h"

namespace gac::cuda {

// The minimum number of tiles per block: its largest slice of a row, for any alignment.
inline int64_t slots_needed(const Arguments& a, int64_t item_size) {
  const int64_t width = kWordBytes / item_size, words = (a.vocab + 2 * width - 2) / width;
  const int64_t slice = (words + a.cluster - 1) / a.cluster;
  return a.out ? (slice + kTileWords - 1) / kTileWords : 1;
}

// Why a launch is impossible, or null.
inline const char* launch_error(const Arguments& a) {
  const int64_t item_size = a.dtype == kFloat32 ? 4 : 2;
  if (a.cluster != 1 && a.cluster != 2 && a.cluster != 4 && a.cluster != 8)
    return "cluster must be 1, 2, 4 or 8 blocks";
  if (a.slots < 1 || a.slots > kMaxSlots) return "slots must be between 1 and 28 tiles";
  if (a.dtype != kFloat32 && a.out && a.out_dtype != a.dtype)
    return "half-precision logits require a gradient of the same dtype";
  if (slots_needed(a, item_size) > a.slots)
    return "the row does not fit in the cluster's shared memory";
  return nullptr;
}

// A cluster processes the rows id, id + count, ... When one cluster ends, the hardware starts the
// next. More clusters are launched than run at once, in up to kTurns turns: a cluster that has to
// wait, because another stream occupies multiprocessors, is then late by one turn and not by the
// whole launch. A turn should be long compared with a cluster's start-up, when nothing is
// prefetched yet: at least kTurnTiles tiles per block, an estimated 50 us on an H200.
constexpr int64_t kTurns = 8, kTurnTiles = 64;

// The number of clusters to launch if `resident` of them run at once on an idle device.
inline int64_t clusters_to_launch(const Arguments& a, int64_t resident) {
  const int64_t width = kWordBytes / (a.dtype == kFloat32 ? 4 : 2);
  const int64_t tiles = (a.vocab / width / a.cluster + kTileWords - 1) / kTileWords;
  const int64_t turns = a.rows / resident * tiles / kTurnTiles;
  return std::min(a.rows, resident * std::clamp<int64_t>(turns, 1, kTurns));
}

}  // namespace gac::cuda
