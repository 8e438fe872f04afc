// CPU versions of the functions in hopper.h, to test the row kernel's source without a GPU.
//
// Every CUDA thread is a fiber, and a scheduler resumes the fibers of all resident clusters in
// random order. Asynchronous copies and stores complete at a random later time, and a copy reads
// its source only then; until then the destination holds nan. Premature reads and writes and waits
// that never end are therefore detected, in shared memory and in the rows themselves. Neither
// memory ordering nor timing is modelled.
#pragma once

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
  int32_t bytes;  // expected minus arrived
};
static_assert(sizeof(Barrier) == 8);

struct alignas(16) Word {
  uint32_t x, y, z, w;
};

// A pending copy to `to`, which signals `barrier` when it completes.
struct Landing {
  char* to;
  const char* from;
  Sums sent;  // the data, if the source is a register
  size_t bytes;
  Barrier* barrier;
};

// The threads that synchronize at one point.
struct Meeting {
  int arrived = 0;
  int64_t generation = 0;
};

struct Warp {
  Meeting before, after;
  float values[32];
};

struct Block {
  int asleep = 0;  // rounds left in which none of its threads runs
  std::vector<Word> memory;
  std::vector<Warp> warps;
  Meeting meeting;
  char* shared() { return reinterpret_cast<char*>(memory.data()); }
};

struct Cluster {
  int64_t id = 0;
  std::vector<Block> blocks;
  Meeting meeting;
  std::vector<Landing> landings;
};

struct Fiber {
  ucontext_t context;
  Cluster* cluster;
  int rank, thread;
  bool over;
  bool (*ready)(void*);  // the condition it waits for, or null
  void* waited;
};

// State shared by all fibers; `current` is the running one.
struct Machine {
  int threads = 0;
  int64_t clusters = 0;
  ucontext_t scheduler;
  Fiber* current = nullptr;

  Cluster& cluster() { return *current->cluster; }
  Block& block() { return cluster().blocks[current->rank]; }

  void yield() { swapcontext(&current->context, &scheduler); }

  // The scheduler polls `ready` for the thread, which is resumed once, when the condition holds.
  template <class Ready>
  void until(Ready ready) {
    if (ready()) return;
    current->waited = &ready;
    current->ready = [](void* waited) { return (*static_cast<Ready*>(waited))(); };
    yield();
    current->ready = nullptr;
  }

  void meet(Meeting& meeting, int parties) {
    const int64_t mine = meeting.generation;
    if (++meeting.arrived == parties) {
      meeting.arrived = 0;
      ++meeting.generation;
    }
    until([&] { return meeting.generation != mine; });
  }

  void advance(Barrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    b.pending = b.arrivals;
    b.parity ^= 1;
  }

  void land(Landing& l) {
    std::memcpy(l.to, l.from ? l.from : reinterpret_cast<const char*>(&l.sent), l.bytes);
    l.barrier->bytes -= static_cast<int32_t>(l.bytes);
    advance(*l.barrier);
  }
};

inline Machine& machine() {
  static Machine m;
  return m;
}

inline int thread() { return machine().current->thread; }
inline int cluster_rank() { return machine().current->rank; }
inline int cluster_size() { return static_cast<int>(machine().cluster().blocks.size()); }
inline int64_t cluster_id() { return machine().cluster().id; }
inline int64_t cluster_count() { return machine().clusters; }

template <class T>
T& there(T& object, int rank) {
  const auto offset = reinterpret_cast<char*>(&object) - machine().block().shared();
  return *reinterpret_cast<T*>(machine().cluster().blocks[rank].shared() + offset);
}

inline void fail(const char* what) { throw std::logic_error(what); }

inline void init(Barrier& b, int arrivals) {
  b = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void publish_barriers() {}
inline void publish_to_copies() {}

inline void arrive(Barrier& b) {
  if (b.pending-- == 0) fail("more arrivals at a barrier than expected");
  machine().advance(b);
}
inline void arrive_expect(Barrier& b, uint32_t bytes) {
  b.bytes += static_cast<int32_t>(bytes);
  arrive(b);
}
template <bool kCluster = false>
void wait(Barrier& b, uint32_t parity) {
  machine().until([&] { return b.parity != parity; });
}

inline void start(const Landing& landing) {
  std::memset(landing.to, 0xff, landing.bytes);
  machine().cluster().landings.push_back(landing);
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier& b) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16 ||
      bytes % 16 || bytes == 0)
    fail("a bulk copy needs addresses and a size that are multiples of 16");
  start({static_cast<char*>(shared), static_cast<const char*>(global), {}, bytes, &b});
}
inline void send(const Sums& sums, Sums& slot, Barrier& b, int rank) {
  char* to = reinterpret_cast<char*>(&there(slot, rank));
  start({to, nullptr, sums, sizeof(Sums), &there(b, rank)});
}

template <int kCount>
void sync_threads() {
  machine().meet(machine().block().meeting, kCount);
}
inline Warp& warp() { return machine().block().warps[thread() / 32]; }
inline void sync_warp() { machine().meet(warp().before, 32); }
inline void sync_cluster() {
  Machine& m = machine();
  m.meet(m.cluster().meeting, cluster_size() * m.threads);
}
inline float shuffle(float x, int lane) {
  Warp& w = warp();
  w.values[thread() % 32] = x;
  machine().meet(w.before, 32);
  const float other = w.values[lane];
  machine().meet(w.after, 32);
  return other;
}
inline float shuffle_xor(float x, int mask) { return shuffle(x, thread() % 32 ^ mask); }

struct Exp2 {
  float operator()(float x) const { return std::exp2(x); }
};

inline Word load_word(const void* shared) { return *static_cast<const Word*>(shared); }
struct Bytes {
  const int8_t* first;
  template <int kWords>
  void load(int q, uint32_t (&four)[kWords]) const {
    std::memcpy(four, first + int64_t(q) * sizeof(four), sizeof(four));
  }
};
inline float sign_of(uint32_t four, int i) { return static_cast<int8_t>(four >> 8 * i); }
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
float largest(const Word (&words)[kWords], T) {
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
