// Row kernels for a cluster of blocks: a row is read once, held in the combined shared memory of
// the blocks, and its gradient is written once.
//
// Each block handles an equal slice of every row of its cluster. One producer thread fills a ring
// buffer of tiles with bulk copies, prefetching as far as there is space, into the next rows too;
// eight consumer warps read it. They pass over a slice twice: for the sums, which the blocks
// exchange through shared memory, and for the gradient. A tile is released after its last use. Sums
// are merged in a fixed order, so results are bitwise reproducible.
#pragma once

#include "gradient.h"

namespace gac::cuda {

// Whether row n, with target y, is read at all. The producer and the consumers all call this, so
// that they agree on the tiles.
GAC_DEVICE bool needs_read(const Arguments& a, int64_t n, int64_t y) {
  if (y == kIgnore) return false;
  return a.task != kGrads || a.d_logps[n] != 0 || a.d_entropy[n] != 0;
}

template <class In>
GAC_DEVICE void produce(const Arguments& a, Shared& shared, char* ring) {
  Cursor at;
  for (int64_t n = cluster_id(); n < a.rows; n += cluster_count()) {
    if (!needs_read(a, n, a.targets[n])) continue;
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

// First pass: this thread's part of the slice's sums. kHeld: the tiles are kept for a second pass.
template <bool kHeld, class In>
GAC_DEVICE Sums read_slice(const Arguments& a, Shared& shared, const char* ring, const Slice& s,
                           Cursor& at) {
  constexpr int kWidth = kWordBytes / sizeof(In);
  Sums sums = empty_sums();
  for (int first = s.begin; first < s.end; first += kTileWords, at.next(a.slots)) {
    wait(shared.full[at.slot], at.parity);
    const char* thread_words = ring + at.slot * kTileBytes + thread() * kWordBytes;
    if (s.covers(first)) {
      Word words[kPerThread];
      float x[kPerThread][kWidth];
#pragma unroll
      for (int u = 0; u < kPerThread; ++u) {
        words[u] = load_word(thread_words + u * kConsumers * kWordBytes);
        unpack(words[u], x[u], In{});
      }
      absorb(sums, x, max_logit(words, In{}), a.exp2_scale, Exp2{});
    } else {
      for (int u = 0; u < kPerThread; ++u) {
        const int q = first + thread() + u * kConsumers;
        if (q >= s.end) break;
        float x[1][kWidth], top = -INFINITY;
        unpack(load_word(thread_words + u * kConsumers * kWordBytes), x[0], In{});
        const Valid valid(s, q, kWidth, a.vocab);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          if (!valid(e)) x[0][e] = -INFINITY;
          top = fmaxf(top, x[0][e]);
        }
        absorb(sums, x, top, a.exp2_scale, Exp2{});
      }
    }
    if (!kHeld) release(shared.empty[at.slot]);
  }
  return sums;
}

template <int kLanes>
GAC_DEVICE Sums gather_lanes(Sums sums, float exp2_scale) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const Sums other{shuffle_xor(sums.top, step), shuffle_xor(sums.mass, step),
                     shuffle_xor(sums.moment, step), shuffle_xor(sums.target, step)};
    sums = merge(sums, other, exp2_scale, Exp2{});
  }
  return sums;
}

// Sends the sums of this block's slice to every block of the cluster.
GAC_DEVICE void send_sums(Shared& shared, Sums partial, int parity, float exp2_scale) {
  partial = gather_lanes<32>(partial, exp2_scale);
  if (thread() % 32 == 0) shared.partial[thread() / 32] = partial;
  sync_threads<kConsumers>();
  if (thread() >= 32) return;
  const Sums all = gather_lanes<kWarps>(shared.partial[thread() % kWarps], exp2_scale);
  if (thread() < cluster_size())
    send(all, shared.inbox[parity][cluster_rank()], shared.exchange[parity], thread());
}

// Merges the sums of all blocks, in the first warp. Every block uses the same order, so the results
// are bitwise equal.
GAC_DEVICE Sums collect(Shared& shared, int parity, uint32_t phase, float exp2_scale) {
  if (thread() == 0) arrive_expect(shared.exchange[parity], cluster_size() * sizeof(Sums));
  wait<true>(shared.exchange[parity], phase);
  const bool valid = thread() < cluster_size();
  const Sums sums = valid ? shared.inbox[parity][thread()] : empty_sums();
  return gather_lanes<kMaxCluster>(sums, exp2_scale);
}

// A target outside [0, V) reads nothing and gives nan.
template <class In>
GAC_DEVICE float target_logit(const Arguments& a, const Slice& s, int64_t y) {
  if (y < 0 || y >= a.vocab) return NAN;
  return to_float(reinterpret_cast<const In*>(s.base)[s.shift + y]);
}

// The per-row inputs, one in each lane of the first warp. They are loaded before the slice, so that
// they have arrived when its sums are ready.
enum Column {
  kAdvantage, kOld, kRef, kScale, kFactor, kRolloutLogp, kDLogp, kDEntropy, kDemo, kTargetLogit
};

template <class In>
GAC_DEVICE float column_of(const Arguments& a, const Slice& s, int64_t n, int64_t y) {
  const float* column = nullptr;
  switch (thread()) {
    case kAdvantage: column = a.advantages; break;
    case kOld: column = a.old; break;
    case kRef: column = a.ref; break;
    case kScale: column = a.scale; break;
    case kFactor: column = a.factor; break;
    case kRolloutLogp: column = a.rollout_logps; break;
    case kDLogp: column = a.d_logps; break;
    case kDEntropy: column = a.d_entropy; break;
    case kDemo: return a.demo && a.demo[n] ? 1.0f : 0.0f;
    case kTargetLogit: return cluster_rank() == 0 ? target_logit<In>(a, s, y) : 0.0f;
  }
  return column ? column[n] : 0.0f;
}

struct Columns {
  float advantage, old, ref, scale, factor, rollout_logp, d_logp, d_entropy;
  bool demo;
};

GAC_DEVICE Columns gather_columns(float column) {
  return {shuffle(column, kAdvantage),   shuffle(column, kOld),    shuffle(column, kRef),
          shuffle(column, kScale),       shuffle(column, kFactor),
          shuffle(column, kRolloutLogp), shuffle(column, kDLogp), shuffle(column, kDEntropy),
          shuffle(column, kDemo) != 0};
}

GAC_DEVICE TokenLoss<float> token_loss(const Arguments& a, const Columns& c, const Statistics& s) {
  const auto spec = TokenSpec<float>::of(a.options);
  float weight = a.factor ? c.factor : 1.0f;
  if (c.demo) return demo_loss(s.logp, c.advantage, spec, weight);
  if (a.rollout_logps) weight *= correction(s.logp - c.rollout_logp, spec);
  return rollout_loss(s.logp, s.entropy, c.advantage, a.old ? c.old : s.logp, a.ref != nullptr,
                      c.ref, spec, weight);
}

// Writes each value to its column; a compile-time count keeps the values in registers.
template <int kCount>
GAC_DEVICE void write_results(const Arguments& a, int64_t n, const float (&values)[kCount]) {
  if (!a.results || cluster_rank() != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) a.results[i * a.rows + n] = values[i];
}

GAC_DEVICE void write_zero_results(const Arguments& a, int64_t n) {
  const float stats[3] = {}, terms[5] = {};
  if (a.task == kStats)
    write_results(a, n, stats);
  else
    write_results(a, n, terms);
}

// Run by one thread: writes the row's results and returns the terms of its gradient.
GAC_DEVICE GradientTerms finish_row(const Arguments& a, const Sums& sums, const Columns& c,
                                    int64_t n, int64_t y) {
  const Statistics s = statistics(sums, a.exp2_scale);
  const int64_t target_index = y >= 0 && y < a.vocab ? y : -1;
  if (a.task == kGrads)
    return gradient_terms(sums, s, target_index, c.d_logp, c.d_entropy, a.inverse_temperature);
  if (a.task == kStats) {
    const float values[] = {s.logp, s.entropy, s.lse};
    write_results(a, n, values);
    return {};
  }
  const TokenLoss<float> token = token_loss(a, c, s);
  const float values[] = {s.logp, s.entropy, token.loss, token.kl, token.clipped ? 1.0f : 0.0f};
  write_results(a, n, values);
  float d_logp = c.scale * token.d_logp;
  if (a.out_dtype == kFloat16) d_logp = bound_for_float16(d_logp, 1 / a.inverse_temperature);
  return gradient_terms(sums, s, target_index, d_logp, c.scale * token.d_entropy,
                        a.inverse_temperature);
}

template <class In, class Out>
GAC_DEVICE void consume(const Arguments& a, Shared& shared, char* ring) {
  Cursor at;
  uint32_t round = 0;  // rows read so far
  int64_t y = a.targets[cluster_id()], next = 0;  // loaded one row ahead to hide its latency
  for (int64_t n = cluster_id(); n < a.rows; n += cluster_count(), y = next) {
    if (n + cluster_count() < a.rows) next = a.targets[n + cluster_count()];
    const Slice s = slice_of<In>(a, n);
    if (!needs_read(a, n, y)) {
      if (a.out) write_zeros<In, Out>(a, s, n);
      if (thread() == 0) write_zero_results(a, n);
      continue;
    }
    const Cursor start = at;
    const float column = column_of<In>(a, s, n, y);
    Sums partial = a.out ? read_slice<true, In>(a, shared, ring, s, at)
                         : read_slice<false, In>(a, shared, ring, s, at);
    if (thread() == kTargetLogit) partial.target = column;
    send_sums(shared, partial, round % 2, a.exp2_scale);
    if (thread() < 32) {
      const Sums sums = collect(shared, round % 2, round / 2 % 2, a.exp2_scale);
      const Columns columns = gather_columns(column);
      if (thread() == 0) shared.gradient = finish_row(a, sums, columns, n, y);
    }
    sync_threads<kConsumers>();
    ++round;
    if (!a.out) continue;
    if (shared.gradient.zero)
      skip_slice<In, Out>(a, shared, s, start, n);
    else if (shared.gradient.linear != 0)
      write_slice<true, In, Out>(a, shared, ring, s, start, n);
    else
      write_slice<false, In, Out>(a, shared, ring, s, start, n);
  }
}

// The program of one thread; `memory` is its block's shared memory.
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
  sync_cluster();  // no block may exit while another one may still store into its shared memory
}

}  // namespace gac::cuda
