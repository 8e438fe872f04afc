// Emulates the library of launch.cu on a CPU, with the same interface; see emulated.h.
#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <random>

#include "plan.h"
#include "rows.h"

namespace gac::cuda {
namespace {

constexpr size_t kStackBytes = 128 << 10;
std::exception_ptr failure;
uint32_t seed = 0;
int64_t launched = 2, resident = 2;  // clusters per launch, and clusters that run at a time

using Program = void (*)(const Arguments&, char*);

// The same dtypes as `kernel_of` in launch.cu.
Program program_of(const Arguments& a) {
  if (a.dtype == kBFloat16) return row_program<BFloat16, BFloat16>;
  if (a.dtype == kFloat16) return row_program<Float16, Float16>;
  switch (a.out ? a.out_dtype : a.dtype) {
    case kBFloat16: return row_program<float, BFloat16>;
    case kFloat16: return row_program<float, Float16>;
    default: return row_program<float, float>;
  }
}

void run_fiber(uint32_t high, uint32_t low) {
  const Arguments& a = *reinterpret_cast<const Arguments*>(uint64_t(high) << 32 | low);
  Emulator& m = emulator();
  try {
    program_of(a)(a, m.block().shared());
  } catch (...) {
    failure = std::current_exception();
  }
  m.current->done = true;
  m.yield();
}

// A slot for one resident cluster, with its blocks and fibers.
struct ClusterSlot {
  std::unique_ptr<char[]> stacks;  // not initialized: most of it is never touched
  std::vector<Fiber> fibers;
  std::unique_ptr<Cluster> cluster;  // null: the slot is free

  void start(const Arguments& a, int64_t id) {
    cluster = std::make_unique<Cluster>();
    cluster->id = id;
    cluster->blocks.resize(a.cluster);
    for (Block& block : cluster->blocks) {
      block.memory.assign((kHeaderBytes + a.slots * kTileBytes) / kWordBytes,
                          Word{~0u, ~0u, ~0u, ~0u});
      block.warps.resize(kThreads / 32);
    }
    fibers = std::vector<Fiber>(a.cluster * kThreads);
    if (!stacks) stacks.reset(new char[fibers.size() * kStackBytes]);
    const auto address = reinterpret_cast<uint64_t>(&a);
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber& f = fibers[i];
      f.cluster = cluster.get();
      f.rank = static_cast<int>(i) / kThreads;
      f.thread = static_cast<int>(i) % kThreads;
      f.done = false;
      f.ready = nullptr;
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = stacks.get() + i * kStackBytes;
      f.start.uc_stack.ss_size = kStackBytes;
      makecontext(&f.start, reinterpret_cast<void (*)()>(run_fiber), 2, uint32_t(address >> 32),
                  uint32_t(address));
    }
  }

  // Frees the slot if the cluster has finished.
  void free_if_done() {
    if (!std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.done; })) return;
    if (!cluster->pending_copies.empty())
      fail("a block exited before all stores into it completed");
    cluster.reset();
    fibers.clear();
  }
};

// Completes some of the pending copies, at least one if no thread can run; returns whether any were
// pending.
bool complete_some(std::vector<PendingCopy>& pending_copies, bool stuck, std::mt19937& random) {
  if (pending_copies.empty()) return false;
  if (!stuck && random() % 2) return true;
  std::shuffle(pending_copies.begin(), pending_copies.end(), random);
  for (size_t count = random() % (pending_copies.size() + 1) + (stuck ? 1 : 0);
       count > 0 && !pending_copies.empty(); --count) {
    emulator().complete(pending_copies.back());
    pending_copies.pop_back();
  }
  return true;
}

// Delays some blocks at random; returns whether any block is delayed.
bool delay_some(std::vector<Block>& blocks, std::mt19937& random) {
  bool any = false;
  for (Block& block : blocks) {
    if (block.delay_rounds > 0)
      --block.delay_rounds;
    else if (random() % 32 == 0)
      block.delay_rounds = 1 << random() % 9;
    any |= block.delay_rounds > 0;
  }
  return any;
}

// Runs the clusters in random order, with at most `resident` at a time. Each round resumes every
// runnable fiber once, in random order over all clusters.
void emulate(const Arguments& a) {
  Emulator& m = emulator();
  std::mt19937 random(seed);
  failure = nullptr;
  m.threads = kThreads;
  m.clusters = std::min(a.rows, launched);
  const int64_t last = a.rows - 1, item_size = a.dtype == kFloat32 ? 4 : 2;
  const int64_t logits =
      last / a.per_batch * a.batch_stride + last % a.per_batch * a.row_stride + a.vocab;
  m.begin = reinterpret_cast<uintptr_t>(a.logits) / kWordBytes * kWordBytes;
  m.end = reinterpret_cast<uintptr_t>(a.logits) + logits * item_size + kWordBytes - 1;
  m.end -= m.end % kWordBytes;
  std::vector<int64_t> waiting(m.clusters);
  std::iota(waiting.begin(), waiting.end(), 0);
  std::shuffle(waiting.begin(), waiting.end(), random);
  std::vector<ClusterSlot> slots(std::min(m.clusters, resident));
  for (;;) {
    std::vector<Fiber*> order;
    bool pending = false, running = false;
    for (ClusterSlot& slot : slots) {
      if (!slot.cluster && !waiting.empty()) {
        slot.start(a, waiting.back());
        waiting.pop_back();
      }
      if (slot.cluster) pending |= delay_some(slot.cluster->blocks, random);
      running |= slot.cluster != nullptr;
      for (Fiber& fiber : slot.fibers) {
        const bool delayed = fiber.cluster->blocks[fiber.rank].delay_rounds > 0;
        if (!fiber.done && !delayed) order.push_back(&fiber);
      }
    }
    if (!running) return;
    bool stuck = true;
    std::shuffle(order.begin(), order.end(), random);
    for (Fiber* fiber : order) {
      if (fiber->ready && !fiber->ready(fiber->waiting_on)) continue;
      stuck = false;
      m.resume(*fiber);
      if (failure) std::rethrow_exception(failure);
    }
    for (ClusterSlot& slot : slots)
      if (slot.cluster) pending |= complete_some(slot.cluster->pending_copies, stuck, random);
    if (stuck && !pending) fail("deadlock: every thread waits for another");
    for (ClusterSlot& slot : slots)
      if (slot.cluster) slot.free_if_done();
  }
}

}  // namespace
}  // namespace gac::cuda

extern "C" void gac_emulate_seed(uint32_t value) { gac::cuda::seed = value; }

// Sets the number of clusters per launch and how many of them run at once.
extern "C" void gac_emulate_clusters(int64_t launched, int64_t resident) {
  gac::cuda::launched = launched;
  gac::cuda::resident = resident;
}

// The number of clusters that launch.cu would launch if `resident` of them run at once.
extern "C" int64_t gac_cuda_clusters(const gac::cuda::Arguments* a, int64_t resident) {
  return gac::cuda::clusters_to_launch(*a, resident);
}

extern "C" const char* gac_cuda_rows(const gac::cuda::Arguments* a, void*) {
  static std::string message;
  if (a->rows == 0) return nullptr;
  if (const char* reason = gac::cuda::launch_error(*a)) return reason;
  try {
    gac::cuda::emulate(*a);
  } catch (const std::exception& error) {
    return (message = error.what()).c_str();
  }
  return nullptr;
}
