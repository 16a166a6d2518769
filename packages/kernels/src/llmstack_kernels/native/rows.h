// Rows shared among threads, and walked a vector at a time.
#pragma once

#include "simd.h"
#include "threads.h"

namespace llmstack {

// Fewer elements than this a thread does sooner than another one starts.
constexpr int64_t kElementsPerChunk = 16384;

// Calls `work(row)` for each row.
template <class Work>
void for_each_row(int64_t num_rows, int64_t row_size, const Work& work) {
  const int64_t wanted = kElementsPerChunk / (row_size > 0 ? row_size : 1);
  const int64_t chunk_rows = wanted > 1 ? wanted : 1;
  for_each_chunk((num_rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * chunk_rows < num_rows ? (chunk + 1) * chunk_rows : num_rows;
    for (int64_t row = chunk * chunk_rows; row < end; ++row) work(row);
  });
}

// Calls `work(start, n)` for each group of up to kLanes elements of a row.
template <class Work>
inline void for_each_vector(int64_t size, const Work& work) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) work(i, kLanes);
  if (i < size) work(i, static_cast<int>(size - i));
}

template <class T>
inline Floats load_some(const T* p, int n) {
  return n == kLanes ? load(p) : load_first(p, n);
}
template <class T>
inline void store_some(T* p, Floats x, int n) {
  if (n == kLanes) {
    store(p, x);
  } else {
    store_first(p, x, n);
  }
}

// `x` as it reads after being stored as T.
template <class T>
inline Floats rounded_to(Floats x) {
  T stored[kLanes];
  store(stored, x);
  return load(stored);
}
template <>
inline Floats rounded_to<float>(Floats x) {
  return x;
}

// Whole numbers within ±127 as bytes. (GCC converts vectors of such different widths lane by lane.)
inline void store_integers(int8_t* out, Floats integers, int n) {
#if defined(__AVX2__)
  if (n == kLanes) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)integers));
#else
    const __m256i whole = _mm256_cvtps_epi32((__m256)integers);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i bytes = _mm_packs_epi16(halves, halves);
#endif
    return std::memcpy(out, &bytes, kLanes), void();
  }
#endif
  for (int i = 0; i < n; ++i) out[i] = static_cast<int8_t>(integers[i]);
}

}  // namespace llmstack
