// Vectors of floats on any processor, and the storage types that are computed on as floats.
//
// Vectors are the compiler's own, as wide as the target's registers: GCC moves wider ones through memory, at a hundredth of
// the speed (measured with AVX2). Intrinsics stand only where the compilers miss an instruction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace llmstack {

using Float32 = float;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kHasFewRegisters = true;
#else
constexpr bool kHasFewRegisters = false;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// bfloat16 and float16 as they lie in memory.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats broadcast(float x) {
  return x - Floats{};  // is x for every x, so that nothing is computed; 0 + x is not, where x is -0
}

// Calls `work` with the numbers below `kCount` as constants. (The compilers do not unroll loops with bodies as long.)
template <int kCount, class Work>
inline __attribute__((always_inline)) void unrolled(const Work& work) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) __attribute__((always_inline)) {
    (work(std::integral_constant<int, kIndices>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// sums[row * kVectors + vector] = product(that sum, x(row), w(vector)), in the order that takes fewer registers. (The sums
// stay in registers where all indices are constants of the language.)
template <int kRows, int kVectors, class Inputs, class Vectors, class Product>
inline __attribute__((always_inline)) void add_products(Floats* sums, const Inputs& x, const Vectors& w,
                                                        const Product& product) {
  if constexpr (kHasFewRegisters && kRows < kVectors) {
    decltype(x(0)) all[kRows] = {};
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) { all[r] = x(r); });
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
      const auto only = w(v);
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
        sums[r * kVectors + v] = product(sums[r * kVectors + v], all[r], only);
      });
    });
  } else {
    decltype(w(0)) all[kVectors];
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) { all[v] = w(v); });
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const auto only = x(r);
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        sums[r * kVectors + v] = product(sums[r * kVectors + v], only, all[v]);
      });
    });
  }
}

// ---- conversions ----

inline float to_float(float x) {
  return x;
}
inline float to_float(BFloat16 x) {
  return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (magnitude << 13));  // infinity, NaN
  // 2^112 moves the exponent's bias from 15 to 127, for subnormal numbers too.
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f));
}

// To nearest, ties to even; a NaN stays one.
inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline Float16 to_float16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds beyond 65504
  if (magnitude < 0x38800000) {  // subnormal: adding 2^-1 leaves the rounded bits at the low end
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_as<uint32_t>(shifted) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline Floats load(const BFloat16* p) {
  Halves x;
  std::memcpy(&x, p, sizeof(x));
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
  return bits_as<Floats>(__builtin_convertvector(x, Words) << 16);
#endif
}
inline Floats load(const Float16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return x;
#endif
}

inline void store(float* p, Floats x) {
  std::memcpy(p, &x, sizeof(x));
}
inline void store(BFloat16* p, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &rounded, sizeof(rounded));
#else
  const Words bits = bits_as<Words>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = (bits >> 16) | 0x40;
  const Words chosen = (x != x) ? quiet : rounded;
  const Halves halves = __builtin_convertvector(chosen, Halves);
  std::memcpy(p, &halves, sizeof(halves));
#endif
}
inline void store(Float16* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_float16(x[i]);
#endif
}

// The first `n` lanes, the others 0.
template <class T>
inline Floats load_first(const T* p, int n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_first(T* p, Floats x, int n) {
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, n * sizeof(T));
}

// ---- arithmetic ----

// a * b + c, rounded once where the processor can.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// a > b ? a : b, which is b where one is a NaN.
inline Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Halves, since a chain of single lanes takes several times as long. The tree of additions is the same everywhere.
inline float sum(Floats x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512d doubles = _mm512_castps_pd((__m512)x);
  const __m256 eights = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(doubles)),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(doubles, 1)));
#else
  const __m256 eights = (__m256)x;
#endif
  const __m128 quarters = _mm_add_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
  const __m128 pairs = _mm_add_ps(quarters, _mm_movehl_ps(quarters, quarters));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
#endif
}

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 quarters = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pairs = _mm_max_ps(quarters, _mm_movehl_ps(quarters, quarters));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

// e^x within 2 units of the last place; 0 below -87.3, e^88 above 88. It is 2^n p(r) by Cody-Waite reduction, with a
// polynomial of degree 6 (the Taylor series, whose remainder on |r| <= ln(2) / 2 is below float's resolution).
inline Floats exponential(Floats x) {
  const Floats lowest = broadcast(-87.3f), highest = broadcast(88.0f);
  const Floats raised = maximum(x, lowest);
  const Floats clamped = raised < highest ? raised : highest;
  const Floats shifter = broadcast(0x1.8p23f);
  const Floats shifted = multiply_add(clamped, broadcast(1.44269504f), shifter);  // rounds to an integer
  const Floats n = shifted - shifter;
  Floats r = multiply_add(n, broadcast(-0.693359375f), clamped);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 720);
  p = multiply_add(p, r, broadcast(1.0f / 120));
  p = multiply_add(p, r, broadcast(1.0f / 24));
  p = multiply_add(p, r, broadcast(1.0f / 6));
  p = multiply_add(p, r, broadcast(0.5f));
  p = multiply_add(p, r, broadcast(1.0f));
  p = multiply_add(p, r, broadcast(1.0f));
  const Ints exponent = bits_as<Ints>(shifted) << 23;
  const Floats scaled = bits_as<Floats>(bits_as<Ints>(p) + exponent);
  return x < lowest ? broadcast(0.0f) : scaled;
}

// 2^x where x is 0 or less, or slightly more, within 3 units of the last place; 0 below -127. A NaN stays one. (The
// polynomial errs by 1e-7 at most and is 1 at 0. e^x would take a reduction of three more products.)
inline Floats power_of_2_below_1(Floats x) {
  const Floats clamped = maximum(broadcast(-127.0f), x);
  const Floats shifter = broadcast(0x1.8p23f + 127);  // the lowest bits of what is shifted are then an exponent's
  const Floats shifted = clamped + shifter;           // rounds to an integer
  const Floats r = clamped - (shifted - shifter);
  Floats p = broadcast(0x1.5bba13p-10f);
  p = multiply_add(p, r, broadcast(0x1.3cea87p-7f));
  p = multiply_add(p, r, broadcast(0x1.c6b753p-5f));
  p = multiply_add(p, r, broadcast(0x1.ebf9bcp-3f));
  p = multiply_add(p, r, broadcast(0x1.62e429p-1f));
  p = multiply_add(p, r, broadcast(1.0f));
  return p * bits_as<Floats>(bits_as<Ints>(shifted) << 23);
}

}  // namespace llmstack
