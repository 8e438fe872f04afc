// Launches the row kernels through a plain C interface: no torch headers, so one library works with
// every torch version.
#include <map>
#include <mutex>
#include <tuple>

#include "plan.h"
#include "rows.h"

namespace gac::cuda {
namespace {

// Two blocks per multiprocessor (three with short ring buffers): while one exchanges its sums, the
// others compute.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads, 3) row_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  row_program<In, Out>(a, memory);
}

using Kernel = void (*)(Arguments);

// The dtypes that the library launches: the gradient has the dtype of the logits or, with float32
// logits in the linear form, a half-precision dtype.
Kernel kernel_of(const Arguments& a) {
  if (a.dtype == kBFloat16) return row_kernel<BFloat16, BFloat16>;
  if (a.dtype == kFloat16) return row_kernel<Float16, Float16>;
  switch (a.out ? a.out_dtype : a.dtype) {
    case kBFloat16: return row_kernel<float, BFloat16>;
    case kFloat16: return row_kernel<float, Float16>;
    default: return row_kernel<float, float>;
  }
}

// Requests the largest ring buffer per block and the maximum shared-memory carve-out.
cudaError_t set_shared_memory(const void* kernel) {
  const int max_bytes = kHeaderBytes + kMaxSlots * kTileBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// Number of clusters that run at once; the driver is queried once per launch configuration.
cudaError_t max_resident_clusters(Kernel kernel, const cudaLaunchConfig_t& config, int device,
                                  int& clusters) {
  static std::mutex mutex;
  static std::map<std::tuple<Kernel, int, unsigned, size_t>, int> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::tuple key{kernel, device, config.attrs[0].val.clusterDim.x, config.dynamicSmemBytes};
  const auto cached = cache.find(key);
  if (cached != cache.end()) {
    clusters = cached->second;
    return cudaSuccess;
  }
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = set_shared_memory(function);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
  if (error == cudaSuccess && clusters < 1) error = cudaErrorInvalidConfiguration;
  if (error == cudaSuccess) cache[key] = clusters;
  return error;
}

cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  cudaError_t error = cudaSetDevice(a.device);  // this library has its own copy of the runtime
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(a.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(a.cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kHeaderBytes + a.slots * kTileBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const Kernel kernel = kernel_of(a);
  int clusters = 0;
  error = max_resident_clusters(kernel, config, a.device, clusters);
  if (error != cudaSuccess) return error;
  config.gridDim = dim3(static_cast<unsigned>(a.cluster * clusters_to_launch(a, clusters)));
  void* arguments[] = {const_cast<Arguments*>(&a)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace
}  // namespace gac::cuda

// Returns null on success, and otherwise the reason why the launch failed.
extern "C" const char* gac_cuda_rows(const gac::cuda::Arguments* a, void* stream) {
  if (a->rows == 0) return nullptr;
  if (const char* reason = gac::cuda::launch_error(*a)) return reason;
  const cudaError_t error = gac::cuda::launch(*a, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
