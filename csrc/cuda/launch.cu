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
  row_program<In, Out, false>(a, memory);
}

// Two blocks per multiprocessor: the sketch sums take more registers.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads, 2) sketch_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  row_program<In, Out, true>(a, memory);
}

// tensor *= factor; returns immediately if the factor is 1.
template <class T>
__global__ void __launch_bounds__(256) scale_kernel(T* tensor, int64_t count, const float* factor) {
  const float multiplier = *factor;
  if (multiplier == 1) return;
  constexpr int kWidth = kWordBytes / sizeof(T);
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t word = first; word < count / kWidth; word += step) {
    Word packed = reinterpret_cast<const Word*>(tensor)[word];
    T* values = reinterpret_cast<T*>(&packed);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[e] = from_float<T>(to_float(values[e]) * multiplier);
    reinterpret_cast<Word*>(tensor)[word] = packed;
  }
  for (int64_t i = count / kWidth * kWidth + first; i < count; i += step)
    tensor[i] = from_float<T>(to_float(tensor[i]) * multiplier);
}

using Kernel = void (*)(Arguments);

template <class In, class Out>
Kernel kernel_of(const Arguments& a) {
  return a.signs ? sketch_kernel<In, Out> : row_kernel<In, Out>;
}

template <class In>
Kernel kernel_of(const Arguments& a) {
  switch (a.out ? a.out_dtype : a.dtype) {
    case kBFloat16: return kernel_of<In, BFloat16>(a);
    case kFloat16: return kernel_of<In, Float16>(a);
    default: return kernel_of<In, float>(a);
  }
}

Kernel kernel_of(const Arguments& a) {
  switch (a.dtype) {
    case kBFloat16: return kernel_of<BFloat16>(a);
    case kFloat16: return kernel_of<Float16>(a);
    default: return kernel_of<float>(a);
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

cudaError_t scale(void* tensor, int64_t count, const float* factor, int32_t dtype, int32_t device,
                  cudaStream_t stream) {
  cudaError_t error = cudaSetDevice(device);
  int multiprocessors = 0;
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int blocks = 8 * multiprocessors;
  switch (dtype) {
    case kBFloat16:
      scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<BFloat16*>(tensor), count, factor);
      break;
    case kFloat16:
      scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<Float16*>(tensor), count, factor);
      break;
    default: scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<float*>(tensor), count, factor);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace gac::cuda

// These functions return null on success, and otherwise the reason why the launch failed.
extern "C" const char* gac_cuda_rows(const gac::cuda::Arguments* a, void* stream) {
  if (a->rows == 0) return nullptr;
  if (const char* reason = gac::cuda::launch_error(*a)) return reason;
  const cudaError_t error = gac::cuda::launch(*a, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" const char* gac_cuda_scale(void* tensor, int64_t count, const float* factor,
                                      int32_t dtype, int32_t device, void* stream) {
  const cudaError_t error = gac::cuda::scale(tensor, count, factor, dtype, device,
                                             static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
