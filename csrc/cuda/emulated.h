// CPU versions of the functions in hopper.h, to test the row kernel's source without a GPU.
//
// Every CUDA thread is a fiber, and a scheduler resumes the fibers of all resident clusters in
// random order. Asynchronous copies and stores complete at a random later time, and a copy reads
// its source only then; until then the destination holds nan. This detects premature reads and
// writes, both in shared memory and in the rows themselves, and waits that never end. Neither
// memory ordering nor timing is modeled.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "row_sums.h"

#define GAC_DEVICE inline

namespace gac::cuda {

struct BFloat16 {
  uint16_t bits;
};
using Float16 = _Float16;

struct Barrier {
  uint8_t arrivals, pending, parity;
  uint8_t unseen;  // 1 if a phase has completed that no thread has waited for yet
  int32_t bytes;  // expected minus arrived
};
static_assert(sizeof(Barrier) == 8);

struct alignas(16) Word {
  uint32_t x, y, z, w;
};

// A pending copy to `to`, which signals `barrier` when it completes.
struct PendingCopy {
  char* to;
  const char* from;
  Sums sent;  // the data, if `from` is null: the source is a register
  size_t bytes;
  Barrier* barrier;
};

// The threads that synchronize at one point.
struct SyncPoint {
  int arrived = 0;
  int64_t generation = 0;
};

struct Warp {
  SyncPoint before, after;  // of an exchange of `values`
  float values[32];
};

struct Block {
  int delay_rounds = 0;  // rounds left in which none of its threads runs
  std::vector<Word> memory;
  std::vector<Warp> warps;
  SyncPoint sync_point;
  char* shared() { return reinterpret_cast<char*>(memory.data()); }
};

struct Cluster {
  int64_t id = 0;
  std::vector<Block> blocks;
  SyncPoint sync_point;
  std::vector<PendingCopy> pending_copies;
};

struct Fiber {
  ucontext_t start;
  jmp_buf state;  // once it has started; setjmp switches without the system calls of swapcontext
  bool started = false;
  Cluster* cluster;
  int rank, thread;
  bool done;
  bool (*ready)(void*);  // the condition it waits for, or null
  void* waiting_on;
};

inline void fail(const char* what) { throw std::logic_error(what); }

// State shared by all fibers; `current` is the running one.
struct Emulator {
  int threads = 0;
  int64_t clusters = 0;
  uintptr_t begin = 0, end = 0;  // of the 16-byte words that hold logits
  jmp_buf scheduler;
  Fiber* current = nullptr;

  Cluster& cluster() { return *current->cluster; }
  Block& block() { return cluster().blocks[current->rank]; }

  void yield() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
  }

  void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    setcontext(&fiber.start);
  }

  // The scheduler polls `ready` for the thread, which is resumed once, when the condition holds.
  template <class Ready>
  void until(Ready ready) {
    if (ready()) return;
    current->waiting_on = &ready;
    current->ready = [](void* waiting_on) { return (*static_cast<Ready*>(waiting_on))(); };
    yield();
    current->ready = nullptr;
  }

  void synchronize(SyncPoint& sync_point, int count) {
    const int64_t generation = sync_point.generation;
    if (++sync_point.arrived == count) {
      sync_point.arrived = 0;
      ++sync_point.generation;
    }
    until([&] { return sync_point.generation != generation; });
  }

  void advance(Barrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    if (b.unseen) fail("a barrier completed a phase before any thread waited for the previous one");
    b.unseen = 1;
    b.pending = b.arrivals;
    b.parity ^= 1;
  }

  void complete(PendingCopy& copy) {
    const char* from = copy.from ? copy.from : reinterpret_cast<const char*>(&copy.sent);
    std::memcpy(copy.to, from, copy.bytes);
    copy.barrier->bytes -= static_cast<int32_t>(copy.bytes);
    advance(*copy.barrier);
  }
};

inline Emulator& emulator() {
  static Emulator m;
  return m;
}

inline int thread() { return emulator().current->thread; }
inline int cluster_rank() { return emulator().current->rank; }
inline int cluster_size() { return static_cast<int>(emulator().cluster().blocks.size()); }
inline int64_t cluster_id() { return emulator().cluster().id; }
inline int64_t cluster_count() { return emulator().clusters; }

// The object at the same shared-memory address in block `rank` of the cluster.
template <class T>
T& in_block(T& object, int rank) {
  const auto offset = reinterpret_cast<char*>(&object) - emulator().block().shared();
  return *reinterpret_cast<T*>(emulator().cluster().blocks[rank].shared() + offset);
}

inline void init(Barrier& b, int arrivals) {
  b = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0, 0};
}
inline void publish_barriers() {}

inline void arrive(Barrier& b) {
  if (b.pending-- == 0) fail("more arrivals at a barrier than expected");
  emulator().advance(b);
}
inline void arrive_expect(Barrier& b, uint32_t bytes) {
  b.bytes += static_cast<int32_t>(bytes);
  arrive(b);
}
template <bool kCluster = false>
void wait(Barrier& b, uint32_t parity) {
  emulator().until([&] { return b.parity != parity; });
  b.unseen = 0;
}

inline void start_copy(const PendingCopy& copy) {
  std::memset(copy.to, 0xff, copy.bytes);
  emulator().cluster().pending_copies.push_back(copy);
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier& b) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16 ||
      bytes % 16 || bytes == 0)
    fail("a bulk copy needs addresses and a size that are multiples of 16");
  const auto from = reinterpret_cast<uintptr_t>(global);
  if (from < emulator().begin || from + bytes > emulator().end)
    fail("a bulk copy reads outside the logits");
  start_copy({static_cast<char*>(shared), static_cast<const char*>(global), {}, bytes, &b});
}
inline void send(const Sums& sums, Sums& slot, Barrier& b, int rank) {
  char* to = reinterpret_cast<char*>(&in_block(slot, rank));
  start_copy({to, nullptr, sums, sizeof(Sums), &in_block(b, rank)});
}

template <int kCount>
void sync_threads() {
  emulator().synchronize(emulator().block().sync_point, kCount);
}
inline Warp& warp() { return emulator().block().warps[thread() / 32]; }
inline void sync_warp() { emulator().synchronize(warp().before, 32); }
inline void sync_cluster() {
  Emulator& m = emulator();
  m.synchronize(m.cluster().sync_point, cluster_size() * m.threads);
}
inline float shuffle(float x, int lane) {
  Warp& w = warp();
  w.values[thread() % 32] = x;
  emulator().synchronize(w.before, 32);
  const float other = w.values[lane];
  emulator().synchronize(w.after, 32);
  return other;
}
inline float shuffle_xor(float x, int mask) { return shuffle(x, thread() % 32 ^ mask); }

struct Exp2 {
  float operator()(float x) const { return std::exp2(x); }
};

inline Word load_word(const void* shared) { return *static_cast<const Word*>(shared); }
template <int kBytes>
void store_bytes(void* global, const uint32_t* words) {
  if (reinterpret_cast<uintptr_t>(global) % kBytes) fail("a wide store is not aligned");
  std::memcpy(global, words, kBytes);
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(Float16 x) { return x; }
template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to nearest even
  } else {
    return static_cast<T>(x);
  }
}
template <int kWidth, class T>
void unpack(Word w, float (&x)[kWidth], T) {
  T values[kWidth];
  std::memcpy(values, &w, sizeof(w));
  for (int e = 0; e < kWidth; ++e) x[e] = to_float(values[e]);
}
template <int kWords, class T>
float max_logit(const Word (&words)[kWords], T) {
  float top = -INFINITY, x[sizeof(Word) / sizeof(T)];
  for (const Word& word : words) {
    unpack(word, x, T{});
    for (const float value : x) top = std::fmax(top, value);
  }
  return top;
}
template <class T>
uint32_t pack(float low, float high, T) {
  const T pair[] = {from_float<T>(low), from_float<T>(high)};
  uint32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return word;
}
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

}  // namespace gac::cuda
