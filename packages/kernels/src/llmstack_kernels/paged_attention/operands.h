// Tiles of keys and values laid out for multiplication, and the multiplication.
//
// Keys are transposed, so that a vector holds one dimension of neighbouring keys; values keep their order. A product's terms are added
// one by one in ascending order, each lane for itself: how many queries and vectors go together changes no result.
#pragma once

#include "../native/simd.h"

namespace llmstack {
namespace {

constexpr int kTileKeys = 64;  // tiles begin at multiples of it in the context, whatever the size of the blocks
constexpr int kTileVectors = kTileKeys / kLanes;

// What one lane multiplies at a time, in 32 bits: a float, or two neighbouring bfloat16 where the processor takes pairs.
template <class T>
struct Operand {
  using Element = float;
  using Word = float;
};

inline Floats add_product(Floats sum, float x, Words w) {
  return multiply_add(broadcast(x), bits_as<Floats>(w), sum);
}

#if defined(__AVX512BF16__)
struct BFloat16Pair {
  BFloat16 first, second;
};

template <>
struct Operand<BFloat16> {
  using Element = BFloat16;
  using Word = BFloat16Pair;
};

inline Floats add_product(Floats sum, BFloat16Pair x, Words w) {
  const __m512i pairs = _mm512_set1_epi32(bits_as<int32_t>(x));
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)w);
}
#endif

template <class T>
constexpr int kPerWord = sizeof(typename Operand<T>::Word) / sizeof(typename Operand<T>::Element);

// ---- multiplication ----

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowBlock = 6, kVectorBlock = 4;  // 24 of 32 registers hold sums
#else
constexpr int kRowBlock = 6, kVectorBlock = 2;  // 12 of 16
#endif

// sums[row][vector] += x[row][0] * w[0][vector] + x[row][1] * w[1][vector] + ..., over `steps` words.
template <class Word>
struct Product {
  const Word* x;
  int64_t x_stride;  // words from row to row
  const Words* w;
  int64_t w_stride;  // vectors from step to step
  int64_t steps;
  Floats* sums;
  int64_t sums_stride;  // vectors from row to row
};

template <int kRows, int kVectors, class Word>
void multiply_block(const Product<Word>& product) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = product.sums[r * product.sums_stride + v];
  }
  const Word* x = product.x;
  const Words* w = product.w;
  for (int64_t k = 0; k < product.steps; ++k, ++x, w += product.w_stride) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_product(sums[r][v], x[r * product.x_stride], w[v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) product.sums[r * product.sums_stride + v] = sums[r][v];
  }
}

template <int kVectors, int kRows, class Word>
void multiply_rows(const Product<Word>& product, int rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kVectors, kRows - 1>(product, rows);
  }
  multiply_block<kRows, kVectors>(product);
}

// At most kRowBlock rows, any number of vectors.
template <int kVectors = kVectorBlock, class Word>
void multiply(Product<Word> product, int rows, int64_t vectors) {
  for (; vectors >= kVectors; vectors -= kVectors, product.w += kVectors, product.sums += kVectors) {
    multiply_rows<kVectors, kRowBlock>(product, rows);
  }
  if constexpr (kVectors > 1) {
    if (vectors > 0) multiply<kVectors - 1>(product, rows, vectors);
  }
}

// ---- keys ----

// 16 bytes of kLanes rows, as words: word i of row j goes to lane j of transposed[i].
inline void transpose(const char* const rows[kLanes], int64_t offset, Words transposed[4]) {
#if defined(__AVX512F__)
  const auto quad = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset)); };
  __m512i q[4];
  for (int j = 0; j < 4; ++j) {  // quarter l of q[j] is of row 4 l + j
    q[j] = _mm512_castsi128_si512(quad(j));
    q[j] = _mm512_mask_broadcast_i32x4(q[j], 0x00f0, quad(4 + j));
    q[j] = _mm512_mask_broadcast_i32x4(q[j], 0x0f00, quad(8 + j));
    q[j] = _mm512_mask_broadcast_i32x4(q[j], 0xf000, quad(12 + j));
  }
  const __m512i low01 = _mm512_unpacklo_epi32(q[0], q[1]), low23 = _mm512_unpacklo_epi32(q[2], q[3]);
  const __m512i high01 = _mm512_unpackhi_epi32(q[0], q[1]), high23 = _mm512_unpackhi_epi32(q[2], q[3]);
  transposed[0] = (Words)_mm512_unpacklo_epi64(low01, low23);
  transposed[1] = (Words)_mm512_unpackhi_epi64(low01, low23);
  transposed[2] = (Words)_mm512_unpacklo_epi64(high01, high23);
  transposed[3] = (Words)_mm512_unpackhi_epi64(high01, high23);
#elif defined(__AVX2__)
  const auto quads = [&](int row) {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(rows[4 + row] + offset),
                               reinterpret_cast<const __m128i*>(rows[row] + offset));
  };
  const __m256i q[4] = {quads(0), quads(1), quads(2), quads(3)};
  const __m256i low01 = _mm256_unpacklo_epi32(q[0], q[1]), low23 = _mm256_unpacklo_epi32(q[2], q[3]);
  const __m256i high01 = _mm256_unpackhi_epi32(q[0], q[1]), high23 = _mm256_unpackhi_epi32(q[2], q[3]);
  transposed[0] = (Words)_mm256_unpacklo_epi64(low01, low23);
  transposed[1] = (Words)_mm256_unpackhi_epi64(low01, low23);
  transposed[2] = (Words)_mm256_unpacklo_epi64(high01, high23);
  transposed[3] = (Words)_mm256_unpackhi_epi64(high01, high23);
#else
  static_assert(kLanes == 4, "one quarter per row");
  uint32_t words[4][4];
  for (int row = 0; row < 4; ++row) std::memcpy(words[row], rows[row] + offset, 16);
  for (int i = 0; i < 4; ++i) transposed[i] = Words{words[0][i], words[1][i], words[2][i], words[3][i]};
#endif
}

// 32 bits of storage in each lane become operands in storage order, `stride` vectors apart.
inline void to_operands(Words words, Words* operands, int64_t, const float*) {
  operands[0] = words;
}
inline void to_operands(Words words, Words* operands, int64_t stride, const BFloat16*) {
  if constexpr (kPerWord<BFloat16> == 2) {
    operands[0] = words;
  } else {
    operands[0] = words << 16;
    operands[stride] = words & 0xffff0000u;
  }
}
inline void to_operands(Words words, Words* operands, int64_t stride, const Float16*) {
  const Halves low = __builtin_convertvector(words & 0xffffu, Halves), high = __builtin_convertvector(words >> 16, Halves);
  Float16 halves[2][kLanes];
  std::memcpy(halves[0], &low, sizeof(low));
  std::memcpy(halves[1], &high, sizeof(high));
  operands[0] = bits_as<Words>(load(halves[0]));
  operands[stride] = bits_as<Words>(load(halves[1]));
}

inline void prefetch(const char* p, int64_t num_bytes) {
  for (int64_t offset = 0; offset < num_bytes; offset += 64) __builtin_prefetch(p + offset);
}

// The first kLanes * `vectors` of a tile's keys, as operands [head_dim / kPerWord][kTileVectors]. Fetches `next` ones.
template <class T>
void pack_keys(const T* const* keys, const T* const* next, int64_t head_dim, int vectors, Words* packed) {
  constexpr int kSteps = 4 / sizeof(T) / kPerWord<T>;  // of 32 bits
  for (int v = 0; v < vectors; ++v) {
    const char* const* rows = reinterpret_cast<const char* const*>(keys + v * kLanes);
    Words* target = packed + v;
    for (int64_t offset = 0; offset < head_dim * static_cast<int64_t>(sizeof(T)); offset += 16) {
      Words words[4];
      transpose(rows, offset, words);
      for (int i = 0; i < 4; ++i, target += kSteps * kTileVectors) {
        to_operands(words[i], target, kTileVectors, static_cast<const T*>(nullptr));
      }
    }
    if (next == nullptr) continue;
    for (int key = v * kLanes; key < (v + 1) * kLanes; ++key) {
      prefetch(reinterpret_cast<const char*>(next[key]), head_dim * sizeof(T));
    }
  }
}

// ---- values ----

// kLanes dimensions of kPerWord values that follow each other, as one operand.
template <class T>
inline Words value_operand(const T* const* values, int64_t dim) {
  if constexpr (kPerWord<T> == 1) {
    return bits_as<Words>(load(values[0] + dim));
  } else {
    Halves even, odd;
    std::memcpy(&even, values[0] + dim, sizeof(even));
    std::memcpy(&odd, values[1] + dim, sizeof(odd));
    return __builtin_convertvector(even, Words) | (__builtin_convertvector(odd, Words) << 16);
  }
}

// The first `num_keys` of a tile's values, as operands [num_keys / kPerWord][head_dim / kLanes]. Fetches `next` ones.
template <class T>
void pack_values(const T* const* values, const T* const* next, int64_t head_dim, int num_keys, Words* packed) {
  for (int key = 0; key < num_keys; key += kPerWord<T>) {
    for (int64_t dim = 0; dim < head_dim; dim += kLanes) *packed++ = value_operand(values + key, dim);
    if (next == nullptr) continue;
    for (int i = 0; i < kPerWord<T>; ++i) {
      prefetch(reinterpret_cast<const char*>(next[key + i]), head_dim * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace llmstack
