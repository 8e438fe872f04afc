// The functions of hopper.h on a CPU, for tests of the row kernel's own source without a GPU.
//
// Every CUDA thread is a fiber, and a scheduler resumes the fibers of one cluster in a random
// order. Asynchronous copies and stores land at a random later time; until then their destination
// holds nan. What is read too early, overwritten too early or waited for in vain therefore shows.
// It does not model memory ordering, nor the time that anything takes.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
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
  int32_t bytes;  // expected, less landed
};
static_assert(sizeof(Barrier) == 8);

struct alignas(16) Word {
  uint32_t x, y, z, w;
};

// A copy under way: `data` lands at `to` and counts on `barrier`.
struct Landing {
  char* to;
  std::vector<char> data;
  Barrier* barrier;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int rank, thread;
  bool over = false;
};

// All blocks that meet at one barrier.
struct Meeting {
  int arrived = 0;
  int64_t generation = 0;
};

struct Warp {
  Meeting before, after;
  float values[32];
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<char*> memory;  // of each rank
  std::vector<Landing> landings;
  std::vector<Warp> warps;
  std::vector<Meeting> blocks;
  Meeting cluster;
  int size = 0, threads = 0;
  int64_t id = 0, count = 0, progress = 0;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::mt19937 random;

  void yield() { swapcontext(&current->context, &scheduler); }

  template <class Ready>
  void until(Ready ready) {
    while (!ready()) yield();
    ++progress;
  }

  void meet(Meeting& meeting, int parties) {
    const int64_t mine = meeting.generation;
    if (++meeting.arrived == parties) {
      meeting.arrived = 0;
      ++meeting.generation;
      ++progress;
    }
    until([&] { return meeting.generation != mine; });
  }

  void advance(Barrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    b.pending = b.arrivals;
    b.parity ^= 1;
    ++progress;
  }

  void land(Landing& l) {
    std::memcpy(l.to, l.data.data(), l.data.size());
    l.barrier->bytes -= static_cast<int32_t>(l.data.size());
    advance(*l.barrier);
    ++progress;
  }
};

inline Machine& machine() {
  static Machine m;
  return m;
}

inline int thread() { return machine().current->thread; }
inline int cluster_rank() { return machine().current->rank; }
inline int cluster_size() { return machine().size; }
inline int64_t cluster_id() { return machine().id; }
inline int64_t cluster_count() { return machine().count; }

template <class T>
T& there(T& object, int rank) {
  Machine& m = machine();
  return *reinterpret_cast<T*>(reinterpret_cast<char*>(&object) - m.memory[cluster_rank()] +
                               m.memory[rank]);
}

inline void fail(const char* what) { throw std::logic_error(what); }

inline void init(Barrier& b, int arrivals) {
  b = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void publish_barriers() {}

inline void arrive(Barrier& b) {
  if (b.pending-- == 0) fail("more arrivals at a barrier than it counts");
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

inline void start(char* to, const void* from, size_t bytes, Barrier& b) {
  const char* data = static_cast<const char*>(from);
  machine().landings.push_back({to, std::vector<char>(data, data + bytes), &b});
  std::memset(to, 0xff, bytes);
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier& b) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16 ||
      bytes % 16 || bytes == 0)
    fail("a bulk copy needs multiples of 16");
  start(static_cast<char*>(shared), global, bytes, b);
}
inline void send(const Sums& sums, Sums& slot, Barrier& b, int rank) {
  start(reinterpret_cast<char*>(&there(slot, rank)), &sums, sizeof(Sums), there(b, rank));
}

template <int kCount>
void sync_threads() {
  machine().meet(machine().blocks[cluster_rank()], kCount);
}
inline Warp& warp() {
  Machine& m = machine();
  return m.warps[(cluster_rank() * m.threads + thread()) / 32];
}
inline void sync_warp() { machine().meet(warp().before, 32); }
inline void sync_cluster() {
  Machine& m = machine();
  m.meet(m.cluster, m.size * m.threads);
}
inline float shuffle_xor(float x, int mask) {
  Warp& w = warp();
  w.values[thread() % 32] = x;
  machine().meet(w.before, 32);
  const float other = w.values[thread() % 32 ^ mask];
  machine().meet(w.after, 32);
  return other;
}

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
template <class T>
uint32_t pack(float low, float high, T) {
  const T pair[] = {from_float<T>(low), from_float<T>(high)};
  uint32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return word;
}
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

}  // namespace gac::cuda
