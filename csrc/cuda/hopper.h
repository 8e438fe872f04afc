// Wrappers of the instructions that the row kernel uses, for compute capability 9.0 and up:
// clusters, transaction barriers, bulk copies and stores into another block's shared memory (PTX
// ISA 8.0).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "row_sums.h"

#define GAC_DEVICE __device__ __forceinline__

namespace gac::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;
using Barrier = uint64_t;
using Word = uint4;

GAC_DEVICE int thread() { return threadIdx.x; }

template <int kId>
GAC_DEVICE uint32_t special_register();
#define GAC_SPECIAL(id, name)                                   \
  template <>                                                   \
  GAC_DEVICE uint32_t special_register<id>() {                  \
    uint32_t value;                                             \
    asm volatile("mov.u32 %0, %%" name ";" : "=r"(value));      \
    return value;                                               \
  }
GAC_SPECIAL(0, "cluster_ctarank")
GAC_SPECIAL(1, "cluster_nctarank")
GAC_SPECIAL(2, "clusterid.x")
GAC_SPECIAL(3, "nclusterid.x")
#undef GAC_SPECIAL
GAC_DEVICE int cluster_rank() { return special_register<0>(); }
GAC_DEVICE int cluster_size() { return special_register<1>(); }
GAC_DEVICE int64_t cluster_id() { return special_register<2>(); }
GAC_DEVICE int64_t cluster_count() { return special_register<3>(); }

GAC_DEVICE uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The corresponding shared-memory address in block `rank` of the cluster.
GAC_DEVICE uint32_t address_in(const void* shared, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address(shared)), "r"(rank));
  return mapped;
}

GAC_DEVICE void init(Barrier& b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&b)), "r"(arrivals)
               : "memory");
}

// Makes the initialized barriers visible to the copy engine and to the other blocks.
GAC_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

GAC_DEVICE void arrive(Barrier& b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&b)) : "memory");
}

// Arrives; the phase completes only after `bytes` more bytes have arrived.
GAC_DEVICE void arrive_expect(Barrier& b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&b)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity completes. kCluster: stores of other blocks are visible
// afterwards.
template <bool kCluster = false>
GAC_DEVICE void wait(Barrier& b, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    if constexpr (kCluster)
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address(&b)), "r"(parity)
          : "memory");
    else
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address(&b)), "r"(parity)
          : "memory");
  }
}

// Starts an asynchronous copy of `bytes` bytes (addresses and size are multiples of 16) that
// signals `b`. The source is not read again, so the L2 evicts it first.
GAC_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier& b) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(address(&b)), "l"(policy)
      : "memory");
}

// Stores `sums` to `slot` in block `rank` and signals its 16 bytes on that block's `b`.
GAC_DEVICE void send(const Sums& sums, Sums& slot, Barrier& b, int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(address_in(&slot, rank)),
      "f"(sums.top), "f"(sums.mass), "f"(sums.moment), "f"(sums.target),
      "r"(address_in(&b, rank))
      : "memory");
}

// Synchronizes the first kCount threads of the block; the others do not take part.
template <int kCount>
GAC_DEVICE void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kCount) : "memory");
}

GAC_DEVICE void sync_warp() { __syncwarp(); }

GAC_DEVICE void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

GAC_DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
GAC_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

struct Exp2 {  // relative error below 2^-22; results below 2^-126 are 0
  GAC_DEVICE float operator()(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

GAC_DEVICE Word load_word(const void* shared) { return *static_cast<const Word*>(shared); }

// Stores 8 or 16 aligned bytes with a streaming hint: they are not read soon.
template <int kBytes>
GAC_DEVICE void store_bytes(void* global, const uint32_t* words) {
  if constexpr (kBytes == 8)
    __stcs(static_cast<uint2*>(global), make_uint2(words[0], words[1]));
  else
    __stcs(static_cast<uint4*>(global), make_uint4(words[0], words[1], words[2], words[3]));
}

GAC_DEVICE float to_float(float x) { return x; }
GAC_DEVICE float to_float(BFloat16 x) { return __bfloat162float(x); }
GAC_DEVICE float to_float(Float16 x) { return __half2float(x); }
template <class T>
GAC_DEVICE T from_float(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else
    return T(x);
}

GAC_DEVICE void unpack(Word w, float (&x)[4], float) {
  x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y);
  x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
}
GAC_DEVICE void unpack(Word w, float (&x)[8], BFloat16) {
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // a bfloat16 is the upper half of a float
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
GAC_DEVICE void unpack(Word w, float (&x)[8], Float16) {
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

// The largest logit in `words`; 16-bit values are compared two at a time.
template <class T>
struct PairOf;
template <>
struct PairOf<BFloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<Float16> {
  using type = __half2;
};
template <int kWords, class T>
GAC_DEVICE float max_logit(const Word (&words)[kWords], T) {
  if constexpr (sizeof(T) == 4) {
    float top = __uint_as_float(words[0].x);
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      top = fmaxf(fmaxf(top, __uint_as_float(words[u].x)), __uint_as_float(words[u].y));
      top = fmaxf(fmaxf(top, __uint_as_float(words[u].z)), __uint_as_float(words[u].w));
    }
    return top;
  } else {
    using Pair = typename PairOf<T>::type;
    const auto pair = [](const uint32_t& x) { return *reinterpret_cast<const Pair*>(&x); };
    Pair top = pair(words[0].x);
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      top = __hmax2(__hmax2(top, pair(words[u].x)), pair(words[u].y));
      top = __hmax2(__hmax2(top, pair(words[u].z)), pair(words[u].w));
    }
    return fmaxf(to_float(top.x), to_float(top.y));
  }
}

// Packs two 16-bit values into a 32-bit word.
GAC_DEVICE uint32_t pack(float low, float high, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
GAC_DEVICE uint32_t pack(float low, float high, Float16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
GAC_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }

}  // namespace gac::cuda
