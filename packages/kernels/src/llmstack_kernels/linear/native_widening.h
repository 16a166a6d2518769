// Widening of small numbers to floats in registers, which is exact, and panels that were widened before.
#pragma once

#include "native.h"

namespace llmstack {

// kLanes bytes as 32-bit integers. (GCC converts vectors of such different widths lane by lane through memory.)
inline Ints widen(const int8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Ints x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}
inline Words widen(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Words x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}

inline Floats to_floats(Ints x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps((__m512i)x);
#else
  return __builtin_convertvector(x, Floats);
#endif
}

// float8 e4m3 divided by 256, which float16 has as it stands: its exponent has one bit more, and a bias that is 8 higher.
inline Floats widen_float8(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7f)), 7);
  return (Floats)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#elif defined(__AVX2__)
  const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x80)), 8);
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x7f)), 7);
  return (Floats)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) {
    const int byte = p[i];
    x[i] = to_float(Float16{static_cast<uint16_t>((byte & 0x80) << 8 | (byte & 0x7f) << 7)});
  }
  return x;
#endif
}

// The entries of a table of 16 that four bits name.
struct Table {
  const float* entries;

  Floats look_up(Words indices) const {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)indices, _mm512_loadu_ps(entries));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(entries), (__m256i)indices);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(entries + 8), (__m256i)indices);
    return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)indices, 28)));
#else
    Floats x;
    for (int i = 0; i < kLanes; ++i) x[i] = entries[indices[i]];
    return x;
#endif
  }
};

// Two rows of weights, for an instruction that takes inputs in pairs.
inline Column<BFloat16> pair_of(Floats even, Floats odd) {
#if defined(__AVX512BF16__)
  const Words low = bits_as<Words>(even) >> 16, high = bits_as<Words>(odd) & 0xffff0000u;  // exact: few digits
  return {bits_as<__m512i>(low | high)};
#else
  return {even, odd};
#endif
}

// Calls `put(column, k)` for each weight of a panel, some inputs of all columns after another, so that what they write
// stays in the first-level cache.
template <class Put>
void for_each_weight(int64_t num_columns, int64_t in_features, const Put& put) {
  constexpr int64_t kInputsAtOnce = 64;
  for (int64_t start = 0; start < in_features; start += kInputsAtOnce) {
    const int64_t end = start + kInputsAtOnce < in_features ? start + kInputsAtOnce : in_features;
    for (int64_t column = 0; column < num_columns; ++column) {
      for (int64_t k = start; k < end; ++k) put(column, k);
    }
  }
}

inline int64_t columns_of(int64_t panel, int64_t out_features) {
  return out_features - panel * kPanel < kPanel ? out_features - panel * kPanel : kPanel;
}

// A panel whose weights were widened before, with the scales of any kind.
template <class T, class Scales, class Place>
struct WidenedPanel : Scales {
  using Weight = T;
  static constexpr bool kTakesWideTiles = true;
  const Column<T>* columns;
  Place place;  // of what was widened

  const WidenedPanel& in_group(int64_t, int) const {
    return *this;
  }
  Column<T> column(int64_t step, int vector) const {
    return columns[step * kVectors + vector];
  }
};

// Up to here, widening again for each tile is cheaper than going through the buffer.
constexpr int64_t kDirectRows = 4 * kTileRows;

}  // namespace llmstack
