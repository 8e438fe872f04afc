// Vectors of floats as wide as the instruction set of this translation unit, and 2^t on them.
//
// Uses compiler vectors, not ATen's: these files are compiled for instruction sets that the
// processor may lack. If they instantiated an inline function of a shared header, the linker might
// keep that copy for the whole library. So nothing outside this namespace is instantiated.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define GAC_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GAC_VECTOR_BYTES 32
#else
#define GAC_VECTOR_BYTES 16
#endif

namespace gac::GAC_ISA {
namespace {

constexpr int kLanes = GAC_VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(GAC_VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(2 * GAC_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(GAC_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(GAC_VECTOR_BYTES / 2)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class V, class T>
inline V read(const T* from) {
  static_assert(sizeof(V) == sizeof(T) * kLanes);
  V v;
  std::memcpy(&v, from, sizeof(V));  // an unaligned load
  return v;
}

inline Floats splat(float x) { return Floats{} + x; }

// Returns the second operand if either is nan, like the instruction: only a nan in `b` propagates.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline Floats load(const float* from) { return read<Floats>(from); }

inline Floats load(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(read<Halves>(from), Words) << 16);
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)read<Halves>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)read<Halves>(from));
#else
  const Words h = __builtin_convertvector(read<Halves>(from), Words);
  const Words sign = (h & 0x8000) << 16, magnitude = (h & 0x7fff) << 13;
  // adjusts the exponent; also correct for subnormals
  const Floats value = (Floats)magnitude * 0x1p112f;
  const Words special = magnitude | 0x7f800000;
  return (Floats)(sign | ((Words)(magnitude >= (0x7c00u << 13)) & special) |
                  (~(Words)(magnitude >= (0x7c00u << 13)) & (Words)value));
#endif
}

inline Floats narrow(Floats v, float) { return v; }

// Round to nearest even; nan stays nan.
inline Halves narrow(Floats v, BFloat16) {
  const Words bits = (Words)v, is_nan = (Words)(v != v);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
}

inline Halves narrow(Floats v, Float16) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Words bits = (Words)v, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormals: adding 0.5 shifts out the value's last bits, and the addition rounds the result.
  const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words is_small = (Words)(magnitude < (113u << 23));
  const Words is_large = (Words)(magnitude >= 0x477ff000);  // rounds to 65536 or beyond
  const Words is_nan = (Words)(magnitude > 0x7f800000);
  const Words finite = (is_small & small) | (~is_small & normal);
  const Words half = (is_large & 0x7c00) | (~is_large & finite) | (is_nan & 0x200);
  return __builtin_convertvector(sign | half, Halves);
#endif
}

template <class T>
inline void store(T* to, Floats v) {
  const auto narrowed = narrow(v, T{});
  std::memcpy(to, &narrowed, sizeof(narrowed));
}

// Loads the first `count` lanes, at most a whole vector; the other lanes are -inf and contribute
// nothing.
template <class T>
inline Floats load_partial(const T* from, int64_t count) {
  T padded[kLanes];
  store(padded, splat(-__builtin_inff()));
  std::memcpy(padded, from, (count < kLanes ? count : kLanes) * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_partial(T* to, Floats v, int64_t count) {
  T padded[kLanes];
  store(padded, v);
  std::memcpy(to, padded, count * sizeof(T));
}

// Non-temporal store, for a buffer that is not read soon: its old content is not fetched first.
// `to` must be aligned to the vector size.
inline void stream(float* to, Floats v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)v);
#elif defined(__x86_64__)
  _mm_stream_ps(to, (__m128)v);
#else
  store(to, v);
#endif
}

// Number of elements until `to` is aligned.
inline int64_t to_alignment(const float* to) {
  const auto misalignment = reinterpret_cast<uintptr_t>(to) % sizeof(Floats);
  return misalignment ? int64_t(sizeof(Floats) - misalignment) / int64_t(sizeof(float)) : 0;
}

// Non-temporal stores are not ordered with other stores: call this before signalling another
// thread.
inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// t = n + f, separated by adding a constant so large that the bits of f are rounded away.
struct Exponent {
  Floats n, f;
};

// Splits t = d scale, with a single rounding if the processor has FMA.
inline Exponent split(Floats d, Floats scale, Floats shift) {
  const Floats n = d * scale + shift;
  return {n, d * scale - (n - shift)};
}

// exp2 is 2^t for t in [-127, 127]: relative error below 2e-7 above -126, exactly 1 at 0 and
// exactly 0 at -127.
#if defined(__AVX2__) && !defined(__AVX512F__)

// n counts eighths. The powers 2^(i / 8) come from a table that fills one of the sixteen registers,
// so that a short polynomial is enough. Table entry i is stored minus i 2^20, because the shifted n
// adds i 2^20 again.
inline Exponent exponent(Floats d, Floats scale) { return split(d, scale, splat(0x1.8p20f)); }

inline Floats exp2(Exponent t) {
  constexpr uint32_t e = 1 << 20;
  const __m256i table = _mm256_setr_epi32(0x3f800000, 0x3f8b95c2 - e, 0x3f9837f0 - 2 * e,
                                          0x3fa5fed7 - 3 * e, 0x3fb504f3 - 4 * e,
                                          0x3fc5672a - 5 * e, 0x3fd744fd - 6 * e,
                                          0x3feac0c7 - 7 * e);  // 2^(i / 8)
  const Words part = (Words)_mm256_permutevar8x32_epi32(table, (__m256i)t.n);
  const Floats power = (Floats)(part + ((Words)t.n << 20));
  Floats q = splat(0x1.c69ff4p-5f);  // minimax polynomial of (2^f - 1) / f in [-1/16, 1/16]
  q = q * t.f + 0x1.ec0c32p-3f;
  q = q * t.f + 0x1.62e432p-1f;
  return q * (t.f * power) + power;  // two short dependency chains instead of one long one
}

#else

inline Exponent exponent(Floats d, Floats scale) { return split(d, scale, splat(0x1.8p23f + 127)); }

inline Floats exp2(Exponent t) {
  Floats q = splat(0x1.5bba14p-10f);  // minimax polynomial of (2^f - 1) / f in [-1/2, 1/2]
  q = q * t.f + 0x1.3cea88p-7f;
  q = q * t.f + 0x1.c6b752p-5f;
  q = q * t.f + 0x1.ebf9bcp-3f;
  q = q * t.f + 0x1.62e42ap-1f;
  return (q * t.f + 1.0f) * (Floats)((Words)t.n << 23);
}

#endif

// Relative error below 3e-7: a polynomial (Cephes) near 0, where 1 - 2 / (e^2x + 1) cancels.
inline Floats tanh(Floats x) {
  const Floats magnitude = x < 0 ? -x : x, bounded = magnitude > 9.1f ? splat(9.1f) : magnitude;
  const Floats growth = exp2(exponent(bounded, splat(2.885390081777926815f)));  // 2 log2(e)
  const Floats far = 1 - 2 / (growth + 1), s = x * x;
  Floats near = splat(-5.70498872745e-3f);
  near = near * s + 2.06390887954e-2f;
  near = near * s - 5.37397155531e-2f;
  near = near * s + 1.33314422036e-1f;
  near = near * s - 3.33332819422e-1f;
  return magnitude < 0.625f ? near * s * x + x : x < 0 ? -far : far;
}

}  // namespace
}  // namespace gac::GAC_ISA
