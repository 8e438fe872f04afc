// What a launch is made of, decided on the host.
#pragma once

#include <algorithm>  // min, clamp

#include "sketch.h"

namespace gac::cuda {

// The tiles that a block needs at least: its largest slice of a row that starts anywhere in a word.
inline int64_t slots_needed(const Arguments& a, int64_t item) {
  const int64_t width = kWordBytes / item, words = (a.vocab + 2 * width - 2) / width;
  const int64_t slice = (words + a.cluster - 1) / a.cluster;
  return a.out ? (slice + kTileWords - 1) / kTileWords : 1;
}

// Why a launch is impossible, or null.
inline const char* refusal(const Arguments& a) {
  const int64_t item = a.dtype == kFloat32 ? 4 : 2;
  if (a.cluster != 1 && a.cluster != 2 && a.cluster != 4 && a.cluster != 8)
    return "a cluster has 1, 2, 4 or 8 blocks";
  if (a.slots < 1 || a.slots > kMaxSlots) return "a ring has 1 to 28 tiles";
  if (a.signs && (a.sketch < 4 || a.sketch > kMaxSketch || (a.sketch & (a.sketch - 1))))
    return "a sketch has 4, 8, 16, 32 or 64 buckets";
  if (slots_needed(a, item) > a.slots) return "the row does not fit the cluster's shared memory";
  return nullptr;
}

// A cluster takes the rows id, id + count, ... The hardware starts the next one where one ends: with
// more clusters than fit at once, those that find no room at first (another stream may hold
// multiprocessors) are late by one turn, not by the whole launch. A turn should be long beside a
// cluster's start, when nothing is read ahead: at least kTurnTiles of each block, some 50 us on an
// H200 by count.
constexpr int64_t kTurns = 8, kTurnTiles = 64;

// Clusters of a launch where `resident` run at once on an idle device.
inline int64_t clusters_of(const Arguments& a, int64_t resident) {
  const int64_t width = kWordBytes / (a.dtype == kFloat32 ? 4 : 2);
  const int64_t tiles = (a.vocab / width / a.cluster + kTileWords - 1) / kTileWords;
  const int64_t turns = a.rows / resident * tiles / kTurnTiles;
  return std::min(a.rows, resident * std::clamp<int64_t>(turns, 1, kTurns));
}

}  // namespace gac::cuda
