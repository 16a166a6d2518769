// Widening of small numbers to floats in registers, which is exact.
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

inline Floats to_floats(Ints x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps((__m512i)x);
#else
  return __builtin_convertvector(x, Floats);
#endif
}

// The entries of a table of 16 that the lowest four bits name.
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
    for (int i = 0; i < kLanes; ++i) x[i] = entries[indices[i] & 15];
    return x;
#endif
  }
};

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

}  // namespace llmstack
