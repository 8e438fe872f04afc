// The CPU implementation of the native operators: rows run in parallel, each one completed while it
// is in cache.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "../token_math.h"
#include "column.h"
#include "rows.h"

namespace gac {
namespace {

using at::Tensor;
using Spec = TokenSpec<double>;

constexpr int64_t kIgnore = -100;
constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;
constexpr int64_t kGrain = 1 << 15;          // minimum number of logits per thread
constexpr int64_t kStreamBytes = 32 << 20;   // larger results bypass the caches: they do not fit

Dtype dtype_of(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    default:
      TORCH_CHECK_TYPE(false, name, " has dtype ", t.scalar_type(),
                       ": use float32, bfloat16 or float16");
  }
}

// [B, T, V] as N = B T rows of any stride.
struct Rows {
  Dtype dtype;
  char* data;
  int64_t count, width, per_batch, item;
  int64_t batch_stride, row_stride;

  Rows(const char* name, const Tensor& t)
      : dtype(dtype_of(name, t)), data(static_cast<char*>(t.data_ptr())), item(t.element_size()) {
    TORCH_CHECK_VALUE(t.dim() == 3, name, " has shape ", t.sizes(), ": expected [B, T, V]");
    TORCH_CHECK_VALUE(t.stride(2) == 1 || t.size(2) <= 1, name, " has strides ", t.strides(),
                      ": the last dimension must be contiguous");
    count = t.size(0) * t.size(1);
    width = t.size(2);
    per_batch = t.size(1);
    batch_stride = t.stride(0) * item;
    row_stride = t.stride(1) * item;
  }

  char* operator[](int64_t i) const {
    return data + i / per_batch * batch_stride + i % per_batch * row_stride;
  }
};

float get(Dtype dtype, const void* row, int64_t i) {
  switch (dtype) {
    case Dtype::bfloat16: return static_cast<const at::BFloat16*>(row)[i];
    case Dtype::float16: return static_cast<const at::Half*>(row)[i];
    default: return static_cast<const float*>(row)[i];
  }
}

void set(Dtype dtype, void* row, int64_t i, float value) {
  switch (dtype) {
    case Dtype::bfloat16: static_cast<at::BFloat16*>(row)[i] = value; break;
    case Dtype::float16: static_cast<at::Half*>(row)[i] = value; break;
    default: static_cast<float*>(row)[i] = value;
  }
}

// A float32 result [N], initialized to 0.
struct Result {
  Tensor tensor;
  float* data;
  explicit Result(int64_t count)
      : tensor(at::zeros({count}, at::kFloat)), data(tensor.mutable_data_ptr<float>()) {}
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
  Worker(const Rows& logits, double temperature, const Rows* out)
      : kernels_(row_kernels()), logits_(logits), out_(out), temperature_(temperature),
        exp2_scale_(static_cast<float>(kLog2e / temperature)),
        scale_error_(exp2_scale_ * temperature / kLog2e - 1) {
    if (!out) return;
    memory_ = c10::GetCPUAllocator()->allocate(kernels_.scratch(logits.width) * sizeof(float));
    scratch_ = static_cast<float*>(memory_.get());
    stream_ = out->data != logits.data && out->count * out->width * out->item > kStreamBytes;
  }

  // `disposable`: the gradient does not need the logits. In place, the row is then overwritten by
  // its powers.
  Statistics read(int64_t i, int64_t target, bool disposable) const {
    void* row = logits_[i];
    const bool replace = disposable && out_ && out_->dtype == Dtype::float32 &&
                         logits_.dtype == Dtype::float32 && (*out_)[i] == row;
    float* powers = replace ? static_cast<float*>(row) : nullptr;
    const bool in_range = target >= 0 && target < logits_.width;  // never read out of bounds
    const double x = in_range ? get(logits_.dtype, row, target) : std::nan("");
    const RowSums s =
        kernels_.sums(logits_.dtype, row, logits_.width, exp2_scale_, scratch_, powers);
    const double log_sum = std::log(s.sum);
    const double entropy = log_sum - kLn2 * s.dot / s.sum;
    const double logp = (x - s.base) * exp2_scale_ * kLn2 - log_sum;
    // The rounded scale amounts to a slightly different temperature; corrected with d logp / d
    // log(scale) = logp + entropy.
    return {s, log_sum, s.base / temperature_ + log_sum, entropy,
            logp * (1 - scale_error_) - scale_error_ * entropy, powers};
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
                        -d_entropy * kLn2 * per_power};
    char* to = (*out_)[i];
    kernels_.gradient(logits_.dtype, logits_[i], out_->dtype, to, logits_.width, exp2_scale_,
                      s.sums, g, scratch_, s.powers, stream_);
    if (target < 0 || target >= logits_.width) return;
    // 1 - p without cancellation; a target of probability 0 adds 0 log 0 = 0 to the entropy.
    const double p = std::exp(s.logp);
    const double entropy_part = p == 0 ? 0 : d_entropy * p * (s.logp + s.entropy);
    set(out_->dtype, to, target,
        static_cast<float>((-d_logp * std::expm1(s.logp) - entropy_part) / temperature_));
  }

 private:
  const RowKernels& kernels_;
  const Rows& logits_;
  const Rows* out_;
  double temperature_;
  float exp2_scale_;
  double scale_error_;
  c10::DataPtr memory_;
  float* scratch_ = nullptr;
  bool stream_ = false;
};

// Calls f(worker, i, target) for every row with a loss; the other rows get a zero gradient.
template <class F>
void for_each_row(const Rows& logits, const Column<int64_t>& targets, double temperature,
                  const Rows* out, const F& f) {
  if (logits.count == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, logits.width));
  at::parallel_for(0, logits.count, grain, [&](int64_t begin, int64_t end) {
    const Worker worker(logits, temperature, out);
    for (int64_t i = begin; i < end; ++i) {
      if (targets[i] == kIgnore)
        worker.write_zero(i);
      else
        f(worker, i, targets[i]);
    }
  });
}

std::optional<Rows> output_rows(const std::optional<Tensor>& out, const Tensor& logits) {
  if (!out) return std::nullopt;
  TORCH_CHECK_VALUE(out->sizes() == logits.sizes(), "out has shape ", out->sizes(),
                    ": expected that of logits, ", logits.sizes());
  return Rows("out", *out);
}

std::tuple<Tensor, Tensor, Tensor> row_stats(const Tensor& logits, const Tensor& targets,
                                             double temperature) {
  const Rows rows("logits", logits);
  const Column<int64_t> y("targets", targets, rows.count);
  const Result logps(rows.count), entropy(rows.count), lse(rows.count);
  for_each_row(rows, y, temperature, nullptr, [&](const Worker& worker, int64_t i, int64_t target) {
    const Statistics s = worker.read(i, target, false);
    logps.data[i] = static_cast<float>(s.logp);
    entropy.data[i] = static_cast<float>(s.entropy);
    lse.data[i] = static_cast<float>(s.lse);
  });
  return {logps.tensor, entropy.tensor, lse.tensor};
}

void row_grads(const Tensor& logits, const Tensor& targets, const Tensor& d_logps,
               const Tensor& d_entropy, double temperature, const Tensor& out) {
  const Rows rows("logits", logits);
  const Column<int64_t> y("targets", targets, rows.count);
  const Column<float> dl("d_logps", d_logps, rows.count), dh("d_entropy", d_entropy, rows.count);
  const auto to = output_rows(out, logits);
  for_each_row(rows, y, temperature, &*to, [&](const Worker& worker, int64_t i, int64_t target) {
    if (dl[i] == 0 && dh[i] == 0) return worker.write_zero(i);
    worker.write(i, target, worker.read(i, target, dh[i] == 0), dl[i], dh[i]);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> row_loss(
    const Tensor& logits, const Tensor& targets, const Tensor& demo, const Tensor& advantages,
    const std::optional<Tensor>& old, const std::optional<Tensor>& ref, const Tensor& scale,
    double ratio_low, double ratio_high, double dual_clip, double kl_coef, int64_t kl_estimator,
    double entropy_coef, int64_t demo_weight, double demo_shape, double temperature,
    const std::optional<Tensor>& out, const std::optional<Tensor>& signs,
    const std::optional<Tensor>& buckets) {
  const Rows rows("logits", logits);
  const int64_t n = rows.count;
  const Column<int64_t> y("targets", targets, n);
  const Column<bool> is_demo("demo", demo, n);
  const Column<float> a("advantages", advantages, n), old_logp("old", old, n),
      ref_logp("ref", ref, n), row_scale("scale", scale, n);
  const Spec spec{ratio_low, ratio_high, dual_clip, kl_coef, static_cast<KlEstimator>(kl_estimator),
                  entropy_coef, static_cast<DemoWeight>(demo_weight), demo_shape};
  const auto to = output_rows(out, logits);
  const Result logps(n), entropy(n), loss(n), kl(n), clipped(n);
  const Column<float> sign("signs", signs, rows.width);
  const int64_t size = buckets ? buckets->size(1) : 0;
  float* const bucket_data = buckets ? buckets->mutable_data_ptr<float>() : nullptr;
  TORCH_CHECK_VALUE(!buckets || (to && to->dtype == Dtype::float32 && buckets->is_contiguous() &&
                                 buckets->size(0) == n && size > 0 && 64 % size == 0),
                    "buckets needs a float32 out, one row per row of logits and a size that "
                    "divides 64");
  for_each_row(rows, y, temperature, to ? &*to : nullptr,
               [&](const Worker& worker, int64_t i, int64_t target) {
    const Statistics s = worker.read(i, target, entropy_coef == 0);
    logps.data[i] = static_cast<float>(s.logp);
    entropy.data[i] = static_cast<float>(s.entropy);
    // rounded as the caller stores it, so that a ratio to it is exactly 1
    const double logp = logps.data[i];
    const TokenLoss<double> token =
        is_demo[i] ? demo_loss<double>(logp, a[i], spec)
                   : rollout_loss<double>(logp, s.entropy, a[i], old_logp ? old_logp[i] : logp,
                                          bool(ref_logp), ref_logp ? ref_logp[i] : 0, spec);
    loss.data[i] = static_cast<float>(token.loss);
    kl.data[i] = static_cast<float>(token.kl);
    clipped.data[i] = token.clipped;
    worker.write(i, target, s, row_scale[i] * token.d_logp, row_scale[i] * token.d_entropy);
    if (bucket_data)  // while the row is in the cache
      row_kernels().buckets(reinterpret_cast<const float*>((*to)[i]), sign.data, rows.width, size,
                            bucket_data + i * size);
  });
  return {logps.tensor, entropy.tensor, loss.tensor, kl.tensor, clipped.tensor};
}

std::string cpu_capability() { return row_kernels().name; }

}  // namespace

TORCH_LIBRARY_IMPL(gac_native, CPU, m) {
  m.impl("row_stats", row_stats);
  m.impl("row_grads", row_grads);
  m.impl("row_loss", row_loss);
}

TORCH_LIBRARY_IMPL(gac_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", cpu_capability);
}

}  // namespace gac
