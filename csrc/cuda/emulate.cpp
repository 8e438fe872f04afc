// The library of launch.cu with the same interface, on a CPU: see emulated.h.
#include <algorithm>
#include <exception>
#include <numeric>

#include "rows.h"

namespace gac::cuda {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int64_t kClusters = 2;  // they share nothing, so one runs after the other
std::exception_ptr failure;
uint32_t seed = 0;

using Program = void (*)(const Arguments&, char*);

template <class In>
Program program_of(int32_t out) {
  switch (out) {
    case kBFloat16: return row_program<In, BFloat16>;
    case kFloat16: return row_program<In, Float16>;
    default: return row_program<In, float>;
  }
}

Program program_of(const Arguments& a) {
  const int32_t out = a.out ? a.out_dtype : a.dtype;
  switch (a.dtype) {
    case kBFloat16: return program_of<BFloat16>(out);
    case kFloat16: return program_of<Float16>(out);
    default: return program_of<float>(out);
  }
}

void enter(uint32_t high, uint32_t low) {
  const Arguments& a = *reinterpret_cast<const Arguments*>(uint64_t(high) << 32 | low);
  Machine& m = machine();
  try {
    program_of(a)(a, m.memory[m.current->rank]);
  } catch (...) {
    failure = std::current_exception();
  }
  m.current->over = true;
  ++m.progress;
  m.yield();
}

void prepare(const Arguments& a, int64_t id, std::vector<std::vector<Word>>& memory) {
  Machine& m = machine();
  m.fibers = std::vector<Fiber>(a.cluster * kThreads);
  m.warps.assign(m.fibers.size() / 32, {});
  m.blocks.assign(a.cluster, {});
  m.cluster = {};
  m.landings.clear();
  m.memory.clear();
  m.size = a.cluster;
  m.threads = kThreads;
  m.id = id;
  m.count = std::min(a.rows, kClusters);
  memory.assign(a.cluster, std::vector<Word>((kHeaderBytes + a.slots * kTileBytes) / 16,
                                             Word{~0u, ~0u, ~0u, ~0u}));
  for (auto& block : memory) m.memory.push_back(reinterpret_cast<char*>(block.data()));
  const auto address = reinterpret_cast<uint64_t>(&a);
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& f = m.fibers[i];
    f.rank = static_cast<int>(i) / kThreads;
    f.thread = static_cast<int>(i) % kThreads;
    f.stack.resize(kStackBytes);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    makecontext(&f.context, reinterpret_cast<void (*)()>(enter), 2, uint32_t(address >> 32),
                uint32_t(address));
  }
}

// Resumes every fiber once per round, in a random order, and lands some of what is under way.
void run() {
  Machine& m = machine();
  std::vector<size_t> order(m.fibers.size());
  std::iota(order.begin(), order.end(), 0);
  for (;;) {
    const int64_t before = m.progress;
    std::shuffle(order.begin(), order.end(), m.random);
    bool alive = false;
    for (const size_t i : order) {
      if (m.fibers[i].over) continue;
      alive = true;
      m.current = &m.fibers[i];
      swapcontext(&m.scheduler, &m.current->context);
      if (failure) std::rethrow_exception(failure);
    }
    if (!alive) return;
    std::shuffle(m.landings.begin(), m.landings.end(), m.random);
    const bool stuck = m.progress == before;
    if (stuck && m.landings.empty()) fail("deadlock: every thread waits for another");
    for (size_t lands = m.random() % (m.landings.size() + 1) + (stuck ? 1 : 0);
         lands > 0 && !m.landings.empty(); --lands) {
      m.land(m.landings.back());
      m.landings.pop_back();
    }
  }
}

void emulate(const Arguments& a) {
  machine().random.seed(seed);
  failure = nullptr;
  for (int64_t id = 0; id < std::min(a.rows, kClusters); ++id) {
    std::vector<std::vector<Word>> memory;
    prepare(a, id, memory);
    run();
    if (!machine().landings.empty()) fail("a block ended before all was stored into it");
  }
}

}  // namespace
}  // namespace gac::cuda

extern "C" void gac_emulate_seed(uint32_t value) { gac::cuda::seed = value; }

extern "C" const char* gac_cuda_rows(const gac::cuda::Arguments* a, void*) {
  static std::string message;
  if (a->rows == 0) return nullptr;
  if (const char* reason = gac::cuda::refusal(*a)) return reason;
  try {
    gac::cuda::emulate(*a);
  } catch (const std::exception& error) {
    return (message = error.what()).c_str();
  }
  return nullptr;
}
