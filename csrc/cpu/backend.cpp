// The CPU implementation of the native operators: rows run in parallel, each one completed while it
// is in cache.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "../token_math.h"
#include "native.h"
#include "parallel.h"
#include "rows.h"

namespace gac {
namespace {

using Spec = TokenSpec<double>;

constexpr int64_t kIgnore = -100;
constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;
constexpr int64_t kGrain = 1 << 15;          // minimum number of logits per thread
constexpr int64_t kStreamBytes = 32 << 20;   // larger results bypass the caches: they do not fit
constexpr std::align_val_t kAlignment{64};   // of the scratch buffers: a cache line

struct Free {
  void operator()(void* p) const { ::operator delete(p, kAlignment); }
};
using Scratch = std::unique_ptr<float, Free>;

Scratch allocate(int64_t count) {
  void* const buffer = ::operator new(count * sizeof(float), kAlignment, std::nothrow);
  return Scratch(static_cast<float*>(buffer));
}

// [B, T, V] as N = B T rows of any stride.
struct Rows {
  Dtype dtype;
  char* data;
  int64_t count, width, per_batch, item;
  int64_t batch_stride, row_stride;

  Rows(const Matrix& m, const RowArguments& a)
      : dtype(static_cast<Dtype>(m.dtype)), data(static_cast<char*>(m.data)), count(a.rows),
        width(a.vocab), per_batch(a.per_batch), item(dtype == Dtype::float32 ? 4 : 2),
        batch_stride(m.batch_stride * item), row_stride(m.row_stride * item) {}

  char* operator[](int64_t i) const {
    return data + i / per_batch * batch_stride + i % per_batch * row_stride;
  }
};

// Statistics of one row's distribution and of its target token, in nats.
struct Statistics {
  RowSums sums;
  double log_sum, lse, entropy, logp;
  float* powers;  // the powers, if they replaced the logits; null: they are in the scratch buffer
};

// The state of one thread: it reads a row, then optionally writes its gradient.
class Worker {
 public:
  Worker(const RowKernels& kernels, const Rows& logits, const RowArguments& a, const Rows* out)
      : kernels_(kernels), logits_(logits), out_(out), temperatures_(a.temperatures),
        softcap_(a.softcap) {
    set_temperature(a.temperature);
    if (softcap_ != 0) capped_ = allocate(logits.width);
    if (!out) return;
    scratch_ = allocate(kernels_.scratch(logits.width));
    stream_ = out->data != logits.data && out->count * out->width * out->item > kStreamBytes;
  }

  // Selects the temperature of row i; call it before the row's other functions.
  void select(int64_t i) {
    if (temperatures_) set_temperature(temperatures_[i]);
  }

  bool out_of_memory() const { return (out_ && !scratch_) || (softcap_ != 0 && !capped_); }

  // `disposable`: the gradient does not need the logits. In place, the row is then overwritten by
  // its powers.
  Statistics read(int64_t i, int64_t target, bool disposable, bool more = false) const {
    if (capped_)
      kernels_.cap(logits_.dtype, logits_[i], logits_.width, static_cast<float>(softcap_),
                   capped_.get());
    const auto [dtype, row] = source(i);
    const bool replace = disposable && out_ && out_->dtype == Dtype::float32 &&
                         dtype == Dtype::float32 && (*out_)[i] == row;
    float* powers = replace ? static_cast<float*>(row) : nullptr;
    const bool in_range = target >= 0 && target < logits_.width;  // never read out of bounds
    const double x = in_range ? kernels_.get(dtype, row, target) : std::nan("");
    const RowSums s =
        kernels_.sums(dtype, row, logits_.width, exp2_scale_, scratch_.get(), powers, more);
    const double log_sum = std::log(s.sum);
    const double entropy = log_sum - kLn2 * s.dot / s.sum;
    const double logp = (x - s.base) * exp2_scale_ * kLn2 - log_sum;
    // The rounded scale amounts to a slightly different temperature; corrected with d logp / d
    // log(scale) = logp + entropy.
    return {s, log_sum, s.base / temperature_ + log_sum, entropy,
            logp * (1 - scale_error_) - scale_error_ * entropy, powers};
  }

  double mean_logit(const Statistics& s) const {
    return s.sums.total / logits_.width / temperature_;
  }

  // Whether the target is the first largest logit of the row that was last passed to `read`; false
  // if a logit of the row is nan.
  bool is_top1(int64_t i, int64_t target, const Statistics& s) const {
    const auto [dtype, row] = source(i);
    return target >= 0 && target < logits_.width && !std::isnan(s.logp) &&
           kernels_.get(dtype, row, target) == s.sums.base &&
           !kernels_.reaches(dtype, row, target, s.sums.base);
  }

  // Replaces the sums of a part of the vocabulary by those of the whole row.
  void renormalize(Statistics& s, double lse, double entropy) const {
    const double log_sum = lse - s.sums.base / temperature_;
    s.logp += s.log_sum - log_sum;
    s.log_sum = log_sum;
    s.sums.sum = std::exp(log_sum);
    s.entropy = entropy;
  }

  double bounded(double d_logp) const {
    const bool narrow = out_ && out_->dtype == Dtype::float16;
    return narrow ? bound_for_float16(d_logp, temperature_) : d_logp;
  }

  void write_zero(int64_t i) const {
    if (out_) std::memset((*out_)[i], 0, out_->width * out_->item);
  }

  // Writes the gradient of d_logp logp + d_entropy entropy. Call it right after `read` of the same
  // row, which may be disposable only if d_entropy is 0.
  void write(int64_t i, int64_t target, const Statistics& s, double d_logp,
             double d_entropy) const {
    if (!out_) return;
    if (d_logp == 0 && d_entropy == 0) return write_zero(i);
    const double per_power = 1 / (temperature_ * s.sums.sum);
    const RowGradient g{(-d_logp - d_entropy * (s.entropy - s.log_sum)) * per_power,
                        -d_entropy * kLn2 * per_power, capped_ ? 1 / softcap_ : 0};
    char* to = (*out_)[i];
    const auto [dtype, row] = source(i);
    kernels_.gradient(dtype, row, out_->dtype, to, logits_.width, exp2_scale_, s.sums, g,
                      scratch_.get(), s.powers, stream_);
    if (target < 0 || target >= logits_.width) return;
    // 1 - p without cancellation; a target of probability 0 adds 0 log 0 = 0 to the entropy.
    const double p = std::exp(s.logp);
    const double entropy_part = p == 0 ? 0 : d_entropy * p * (s.logp + s.entropy);
    const double d_z = -d_logp * std::expm1(s.logp) - entropy_part;
    kernels_.set(out_->dtype, to, target,
                 static_cast<float>(d_z / temperature_ * cap_slope(target)));
  }

 private:
  void set_temperature(double temperature) {
    temperature_ = temperature;
    exp2_scale_ = static_cast<float>(kLog2e / temperature);
    scale_error_ = exp2_scale_ * temperature / kLog2e - 1;
  }
  struct Source {
    Dtype dtype;
    void* row;
  };
  // The derivative of the softcap at an entry of the last row read.
  double cap_slope(int64_t entry) const {
    if (!capped_) return 1;
    const double share = capped_.get()[entry] / softcap_;
    return std::isinf(share) ? 0 : 1 - share * share;
  }
  // The logits of row i; if there is a softcap, the capped ones of the last row read.
  Source source(int64_t i) const {
    if (capped_) return {Dtype::float32, capped_.get()};
    return {logits_.dtype, logits_[i]};
  }

  const RowKernels& kernels_;
  const Rows& logits_;
  const Rows* out_;
  const float* temperatures_;
  double temperature_, softcap_;
  float exp2_scale_;
  double scale_error_;
  Scratch scratch_, capped_;
  bool stream_ = false;
};

// Calls f(worker, i, target) for every row with a loss, and skip(i) for the others, which get a zero
// gradient. Returns an error message or null.
template <class F, class Skip>
const char* for_each_row(const RowArguments& a, const F& f, const Skip& skip) {
  const RowKernels* const kernels = row_kernels();
  if (!kernels) return "GAC_CPU_CAPABILITY names an instruction set that this processor lacks";
  if (a.rows == 0) return nullptr;
  if (!a.logits.data || !a.targets) return "logits or targets hold no data";
  const Rows logits(a.logits, a), out(a.out, a);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.vocab));
  std::atomic<bool> failed = false;
  parallel_for(a.rows, grain, a.threads, [&](int64_t begin, int64_t end) {
    Worker worker(*kernels, logits, a, a.out.data ? &out : nullptr);
    if (worker.out_of_memory()) {
      failed = true;
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (a.targets[i] != kIgnore) {
        worker.select(i);
        f(worker, i, a.targets[i]);
      } else {
        worker.write_zero(i);
        skip(i);
      }
    }
  });
  return failed ? "not enough memory for the buffer of a row" : nullptr;
}

}  // namespace
}  // namespace gac

const char* gac_row_stats(const gac::RowArguments* arguments) {
  using namespace gac;
  const RowArguments& a = *arguments;
  const bool more = a.is_top1 != nullptr;
  return for_each_row(
      a,
      [&](const Worker& worker, int64_t i, int64_t target) {
        const Statistics s = worker.read(i, target, false, more);
        a.logps[i] = static_cast<float>(s.logp);
        a.entropy[i] = static_cast<float>(s.entropy);
        a.lse[i] = static_cast<float>(s.lse);
        if (!more) return;
        a.log_sum_sq_probs[i] = static_cast<float>(std::log(s.sums.squares) - 2 * s.log_sum);
        a.mean_logits[i] = static_cast<float>(worker.mean_logit(s));
        a.is_top1[i] = worker.is_top1(i, target, s);
      },
      [&](int64_t i) {
        a.logps[i] = a.entropy[i] = a.lse[i] = 0;
        if (more) a.log_sum_sq_probs[i] = a.mean_logits[i] = a.is_top1[i] = 0;
      });
}

const char* gac_row_grads(const gac::RowArguments* arguments) {
  using namespace gac;
  const RowArguments& a = *arguments;
  return for_each_row(
      a,
      [&](const Worker& worker, int64_t i, int64_t target) {
        const float d_logp = a.d_logps[i], d_entropy = a.d_entropy[i];
        if (d_logp == 0 && d_entropy == 0) return worker.write_zero(i);
        Statistics s = worker.read(i, target, d_entropy == 0);
        if (a.lse) {
          if (s.sums.sum == 0) return worker.write_zero(i);  // masked in this part
          worker.renormalize(s, a.lse[i], a.entropy[i]);
        }
        worker.write(i, target, s, d_logp, d_entropy);
      },
      [](int64_t) {});
}

const char* gac_row_loss(const gac::RowArguments* arguments) {
  using namespace gac;
  const RowArguments& a = *arguments;
  const Spec spec = Spec::of(a.options);
  return for_each_row(
      a,
      [&](const Worker& worker, int64_t i, int64_t target) {
        const Statistics s = worker.read(i, target, spec.entropy_coef == 0);
        a.logps[i] = static_cast<float>(s.logp);
        a.entropy[i] = static_cast<float>(s.entropy);
        // rounded as the caller stores it, so that a ratio to it is exactly 1
        const double logp = a.logps[i];
        double weight = a.factor ? a.factor[i] : 1;
        if (a.rollout_logps && !a.demo[i])
          weight *= correction<double>(logp - a.rollout_logps[i], spec);
        const TokenLoss<double> token =
            a.demo[i] ? demo_loss<double>(logp, a.advantages[i], spec, weight)
                      : rollout_loss<double>(logp, s.entropy, a.advantages[i],
                                             a.old ? a.old[i] : logp, a.ref != nullptr,
                                             a.ref ? a.ref[i] : 0, spec, weight);
        a.loss[i] = static_cast<float>(token.loss);
        a.kl[i] = static_cast<float>(token.kl);
        a.clipped[i] = token.clipped;
        const double d_logp = worker.bounded(a.scale[i] * token.d_logp);
        const double d_entropy = a.scale[i] * token.d_entropy;
        worker.write(i, target, s, d_logp, d_entropy);
      },
      [&](int64_t i) {
        a.logps[i] = a.entropy[i] = a.loss[i] = a.kl[i] = a.clipped[i] = 0;
      });
}
