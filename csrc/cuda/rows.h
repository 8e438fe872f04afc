// Row kernels for a cluster of blocks: a row is read once, held in the shared memory of all blocks
// together, and its gradient written once.
//
// Each block takes an equal slice of every row of its cluster. One thread feeds a ring of tiles by
// bulk copies, as far ahead as there is room, into the next rows too; eight warps consume it. They
// pass over a slice twice: sums, which the blocks exchange through shared memory, and gradient. A
// tile goes back to the ring after its last use. Sums are merged in a fixed order, so results repeat
// bit for bit.
//
// Rows need no alignment: words of 16 bytes are counted from the aligned address at or before the
// row's first logit, and what is outside the row in the first and the last word is ignored. (An
// aligned word with one valid byte can be read.)
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

// The beginning of a block's shared memory; the ring follows after kHeaderBytes.
struct Shared {
  Sums inbox[2][kMaxCluster];  // by parity of the row and rank of the sender
  Sums partial[kWarps];
  Pull pull;
  Barrier full[kMaxSlots], empty[kMaxSlots], exchange[2];
};
static_assert(sizeof(Shared) <= kHeaderBytes);

// A place in the ring, and the parity of the barrier phase that fills it.
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  GAC_DEVICE void next(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// The words [begin, end) that this block holds of a row of `words` words; the row's first logit is
// number `shift` of word 0.
struct Slice {
  const char* base;
  int shift, words, begin, end;
  GAC_DEVICE int tiles() const { return (end - begin + kTileWords - 1) / kTileWords; }
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
  s.words = static_cast<int>((s.shift + a.vocab + kWidth - 1) / kWidth);
  const int share = (s.words + cluster_size() - 1) / cluster_size();
  s.begin = share * cluster_rank() < s.words ? share * cluster_rank() : s.words;
  s.end = s.begin + share < s.words ? s.begin + share : s.words;
  return s;
}

// Whether any logit of row n is read. Both roles ask, so that they agree on the tiles.
GAC_DEVICE bool reads(const Arguments& a, int64_t n) {
  if (a.targets[n] == kIgnore) return false;
  return a.task != kGrads || a.d_logps[n] != 0 || a.d_entropy[n] != 0;
}

template <class In>
GAC_DEVICE void produce(const Arguments& a, Shared& shared, char* ring) {
  Cursor at;
  for (int64_t n = cluster_id(); n < a.rows; n += cluster_count()) {
    if (!reads(a, n)) continue;
    const Slice s = slice_of<In>(a, n);
    for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots)) {
      const int words = s.end - first < kTileWords ? s.end - first : kTileWords;
      wait(shared.empty[at.slot], at.parity ^ 1);
      arrive_expect(shared.full[at.slot], words * kWordBytes);
      bulk_load(ring + at.slot * kTileBytes, s.base + int64_t(first) * kWordBytes,
                words * kWordBytes, shared.full[at.slot]);
    }
  }
}

// After the last use of a tile by this warp.
GAC_DEVICE void release(Barrier& empty) {
  sync_warp();
  if (thread() % 32 == 0) arrive(empty);
}

// The logits of word q, -inf for those outside the row or the slice.
template <class In, int kWidth>
GAC_DEVICE void logits_of(const Slice& s, const char* tile, int in_tile, int q, int64_t vocab,
                          float* x) {
  float word[kWidth];
  unpack(load_word(tile + in_tile * kWordBytes), word, In{});
  const bool whole = q < s.end && q > 0 && q < s.words - 1;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) x[e] = word[e];
  if (whole) return;
  const int64_t first = int64_t(q) * kWidth - s.shift;
#pragma unroll
  for (int e = 0; e < kWidth; ++e)
    if (q >= s.end || first + e < 0 || first + e >= vocab) x[e] = -INFINITY;
}

// First pass: this thread's part of the sums of the slice.
template <class In>
GAC_DEVICE Sums read_slice(const Arguments& a, Shared& shared, const char* ring, const Slice& s,
                           Cursor& at) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  Sums sums = no_sums();
  for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots)) {
    wait(shared.full[at.slot], at.parity);
    float x[kPerThread * kWidth];
#pragma unroll
    for (int u = 0; u < kPerThread; ++u) {
      const int in_tile = thread() + u * kConsumers;
      logits_of<In, kWidth>(s, ring + at.slot * kTileBytes, in_tile, first + in_tile, a.vocab,
                            x + u * kWidth);
    }
    if (!a.out) release(shared.empty[at.slot]);
    absorb(sums, x, a.slope, Exp2{});
  }
  return sums;
}

template <int kLanes>
GAC_DEVICE Sums gather_lanes(Sums sums, float slope) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const Sums other{shuffle_xor(sums.top, step), shuffle_xor(sums.mass, step),
                     shuffle_xor(sums.moment, step), shuffle_xor(sums.target, step)};
    sums = merge(sums, other, slope, Exp2{});
  }
  return sums;
}

// Sends the sums of this block's slice to every block of the cluster.
GAC_DEVICE void share(Shared& shared, Sums mine, int parity, float slope) {
  mine = gather_lanes<32>(mine, slope);
  if (thread() % 32 == 0) shared.partial[thread() / 32] = mine;
  sync_threads<kConsumers>();
  if (thread() >= 32) return;
  const Sums all = gather_lanes<kWarps>(shared.partial[thread() % kWarps], slope);
  if (thread() < cluster_size())
    send(all, shared.inbox[parity][cluster_rank()], shared.exchange[parity], thread());
}

// The sums of the whole row; parts are merged by rank, so that all blocks get the same bits.
GAC_DEVICE Sums collect(Shared& shared, int parity, uint32_t phase, float slope) {
  arrive_expect(shared.exchange[parity], cluster_size() * sizeof(Sums));
  wait<true>(shared.exchange[parity], phase);
  Sums all = shared.inbox[parity][0];
  for (int rank = 1; rank < cluster_size(); ++rank)
    all = merge(all, shared.inbox[parity][rank], slope, Exp2{});
  return all;
}

// A target outside [0, V) reads nothing and gives nan.
template <class In>
GAC_DEVICE float target_logit(const Arguments& a, const Slice& s, int64_t y) {
  if (y < 0 || y >= a.vocab) return NAN;
  return to_float(reinterpret_cast<const In*>(s.base)[s.shift + y]);
}

GAC_DEVICE TokenLoss<float> token_loss(const Arguments& a, int64_t n, const Statistics& s) {
  const TokenSpec<float> spec{a.ratio_low, a.ratio_high, a.dual_clip, a.kl_coef,
                              static_cast<KlEstimator>(a.kl_estimator), a.entropy_coef,
                              static_cast<DemoWeight>(a.demo_weight), a.demo_shape};
  const float advantage = a.advantages[n];
  if (a.demo[n]) return demo_loss(s.logp, advantage, spec);
  return rollout_loss(s.logp, s.entropy, advantage, a.old ? a.old[n] : s.logp, a.ref != nullptr,
                      a.ref ? a.ref[n] : 0.0f, spec);
}

// One column each; a constant count keeps the values in registers.
template <int kCount>
GAC_DEVICE void write_results(const Arguments& a, int64_t n, const float (&values)[kCount]) {
  if (!a.results || cluster_rank() != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) a.results[i * a.rows + n] = values[i];
}

GAC_DEVICE void write_blank(const Arguments& a, int64_t n) {
  const float stats[3] = {}, terms[5] = {};
  if (a.task == kStats)
    write_results(a, n, stats);
  else
    write_results(a, n, terms);
}

// One thread: the row's results, and what its gradient is made of.
GAC_DEVICE Pull conclude(const Arguments& a, const Sums& sums, int64_t n) {
  const Statistics s = statistics(sums, a.slope);
  if (a.task == kGrads)
    return pull_of(sums, s, a.d_logps[n], a.d_entropy[n], a.inverse_temperature);
  if (a.task == kStats) {
    const float values[] = {s.logp, s.entropy, s.lse};
    write_results(a, n, values);
    return {};
  }
  const TokenLoss<float> token = token_loss(a, n, s);
  const float values[] = {s.logp, s.entropy, token.loss, token.kl, token.clipped ? 1.0f : 0.0f};
  write_results(a, n, values);
  const float share = a.scale[n];
  return pull_of(sums, s, share * token.d_logp, share * token.d_entropy, a.inverse_temperature);
}

// Where the gradient of a row goes. Words that are whole and aligned there are stored whole.
template <class Out, int kWidth>
struct Destination {
  static constexpr int kBytes = kWidth * sizeof(Out);
  static constexpr int kStore = kBytes < kWordBytes ? kBytes : kWordBytes;
  Out* row;
  int64_t vocab;
  int shift;
  bool aligned;

  GAC_DEVICE Destination(const Arguments& a, int64_t n, int shift) : vocab(a.vocab), shift(shift) {
    row = static_cast<Out*>(a.out) + n / a.per_batch * a.out_batch_stride +
          n % a.per_batch * a.out_row_stride;
    aligned = (reinterpret_cast<uintptr_t>(row) - shift * sizeof(Out)) % kStore == 0;
  }

  GAC_DEVICE void store(int q, const float (&g)[kWidth]) const {
    const int64_t first = int64_t(q) * kWidth - shift;
    if (aligned && first >= 0 && first + kWidth <= vocab) {
      uint32_t words[kBytes / 4];
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        if constexpr (sizeof(Out) == 4)
          words[i] = bits_of(g[i]);
        else
          words[i] = pack(g[2 * i], g[2 * i + 1], Out{});
      }
#pragma unroll
      for (int i = 0; i < kBytes / kStore; ++i)
        store_bytes<kStore>(row + first + i * kStore / sizeof(Out), words + i * kStore / 4);
      return;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (first + e >= 0 && first + e < vocab) row[first + e] = from_float<Out>(g[e]);
  }
};

template <class In, class Out>
GAC_DEVICE void write_zeros(const Arguments& a, int64_t n) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  const Slice s = slice_of<In>(a, n);
  const Destination<Out, kWidth> to(a, n, s.shift);
  const float zeros[kWidth] = {};
  for (int q = s.begin + thread(); q < s.end; q += kConsumers) to.store(q, zeros);
}

// Second pass: the gradient of the slice; `at` is where its first tile is.
template <class In, class Out>
GAC_DEVICE void write_slice(const Arguments& a, Shared& shared, const char* ring, const Slice& s,
                            Cursor at, int64_t n) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  const Pull pull = shared.pull;
  const Destination<Out, kWidth> to(a, n, s.shift);
  const int64_t y = a.targets[n];
  const bool known = y >= 0 && y < a.vocab;
  const int hit = known ? static_cast<int>((y + s.shift) / kWidth) : -1;
  const int hit_element = known ? static_cast<int>((y + s.shift) % kWidth) : 0;
  for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots)) {
#pragma unroll
    for (int u = 0; u < kPerThread; ++u) {
      const int in_tile = thread() + u * kConsumers, q = first + in_tile;
      if (q >= s.end) continue;
      float x[kWidth], g[kWidth];
      unpack(load_word(ring + at.slot * kTileBytes + in_tile * kWordBytes), x, In{});
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float t = (x[e] - pull.top) * a.slope;
        const float weight = pull.linear == 0
                                 ? pull.constant
                                 : fmaf(pull.linear, fmaxf(t, kFloor), pull.constant);
        g[e] = Exp2{}(t) * weight;
      }
      if (q == hit) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e)
          if (e == hit_element) g[e] = pull.target;
      }
      if (pull.zero) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) g[e] = 0;
      }
      to.store(q, g);
    }
    release(shared.empty[at.slot]);
  }
}

template <class In, class Out>
GAC_DEVICE void consume(const Arguments& a, Shared& shared, const char* ring) {
  Cursor at;
  uint32_t round = 0;  // rows read so far
  for (int64_t n = cluster_id(); n < a.rows; n += cluster_count()) {
    if (!reads(a, n)) {
      if (a.out) write_zeros<In, Out>(a, n);
      if (thread() == 0) write_blank(a, n);
      continue;
    }
    const Slice s = slice_of<In>(a, n);
    const Cursor start = at;
    const bool first = thread() == 0 && cluster_rank() == 0;
    const float target = first ? target_logit<In>(a, s, a.targets[n]) : 0.0f;
    Sums mine = read_slice<In>(a, shared, ring, s, at);
    mine.target = target;
    share(shared, mine, round % 2, a.slope);
    if (thread() == 0)
      shared.pull = conclude(a, collect(shared, round % 2, round / 2 % 2, a.slope), n);
    sync_threads<kConsumers>();
    if (a.out) write_slice<In, Out>(a, shared, ring, s, start, n);
    ++round;
  }
}

// The whole program of one thread; `memory` is its block's shared memory.
template <class In, class Out>
GAC_DEVICE void row_program(const Arguments& a, char* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  char* ring = memory + kHeaderBytes;
  if (thread() == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      init(shared.full[slot], 1);
      init(shared.empty[slot], kWarps);
    }
    init(shared.exchange[0], 1);
    init(shared.exchange[1], 1);
    publish_barriers();
  }
  sync_cluster();
  if (thread() < kConsumers)
    consume<In, Out>(a, shared, ring);
  else if (thread() == kConsumers)
    produce<In>(a, shared, ring);
  sync_warp();
  sync_cluster();  // nobody leaves while another block may still store into its memory
}

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
  if (slots_needed(a, item) > a.slots) return "the row does not fit the cluster's shared memory";
  return nullptr;
}

}  // namespace gac::cuda
