// Tiles of keys and values laid out for multiplication, and the multiplication.
//
// Keys are transposed, so that a vector holds one dimension of neighbouring keys; values keep their order. A product's
// terms are added one by one in ascending order, each lane for itself: how many queries and vectors go together changes
// no result.
#pragma once

#include <utility>

#include "../native/simd.h"

namespace llmstack {
namespace {

constexpr int kTileKeys = 64;  // tiles begin at multiples of it in the context, whatever the size of the blocks
constexpr int kTileVectors = kTileKeys / kLanes;

// What one lane multiplies at a time, in 32 bits: a float, or two bfloat16 where the processor multiplies pairs.
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

// ---- memory ----

// Neighbouring bytes of a block.
struct Stretch {
  const char *begin, *end;
};

// Prefetches stretches in small parts while others are computed on: all at once would queue, and leave memory idle later.
class Fetch {
 public:
  Fetch() = default;
  explicit Fetch(const Stretch* stretches)  // the last one is empty
      : next_(stretches + 1), at_(stretches->begin), end_(stretches->end) {}

  // The next `kLines` cache lines, if any are left. What exceeds a stretch is fetched in vain. Into the second-level cache,
  // since more lines can be under way to it than to the first (measured: 1.6 times the speed); locality 3 is the first.
  template <int kLines, int kLocality = 2>
  void next() {
    if (at_ == end_) return;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + 64 * line, 0, kLocality);
    at_ += 64 * kLines;
    if (at_ < end_) return;
    at_ = next_->begin;
    end_ = next_++->end;
  }

 private:
  const Stretch* next_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
};

// ---- multiplication ----

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowBlock = 6, kVectorBlock = 4;  // 24 of 32 registers hold sums
#else
constexpr int kRowBlock = 6, kVectorBlock = 2;  // 12 of 16
#endif

// sums[row][vector] = sums[row][vector] * factors[row] + x[row][0] * w[0][vector] + x[row][1] * w[1][vector] + ..., over
// `steps` words.
template <class Word>
struct Product {
  const Word* x;
  int64_t x_stride;  // words from row to row
  const Words* w;
  int64_t w_stride;  // vectors from step to step
  int64_t steps;
  Floats* sums;
  int64_t sums_stride;   // vectors from row to row
  const float* factors;  // null: sums begin at 0
};

// (Not inlined, and with indices that are constants of the language: the sums then stay in registers.)
template <int kRows, int kVectors, bool kHasFactors, class Word>
__attribute__((noinline)) void multiply_block(const Product<Word>& product, Fetch& fetch) {
  Floats sums[kRows * kVectors];
  const auto for_each_sum = [&](const auto& work) __attribute__((always_inline)) {
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      Floats* const row = product.sums + r * product.sums_stride;
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) { work(r, row[v], sums[r * kVectors + v]); });
    });
  };
  for_each_sum([&](auto r, const Floats& before, Floats& sum) __attribute__((always_inline)) {
    if constexpr (kHasFactors) {
      sum = before * product.factors[r];
    } else {
      sum = Floats{};
    }
  });
  const Word* x = product.x;
  const Words* w = product.w;
  const int64_t x_stride = product.x_stride, w_stride = product.w_stride;
  Fetch next = fetch;
  for (int64_t k = 0; k < product.steps; ++k, ++x, w += w_stride) {
    next.next<2>();
    add_products<kRows, kVectors>(
        sums, [&](auto r) __attribute__((always_inline)) { return x[r * x_stride]; },
        [&](auto v) __attribute__((always_inline)) { return w[v]; },
        [](Floats sum, Word one, Words other) __attribute__((always_inline)) { return add_product(sum, one, other); });
  }
  fetch = next;
  for_each_sum([](auto, Floats& after, Floats sum) __attribute__((always_inline)) { after = sum; });
}

template <int kVectors, int kRows, class Word>
void multiply_rows(const Product<Word>& product, int rows, Fetch& fetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kVectors, kRows - 1>(product, rows, fetch);
  }
  product.factors ? multiply_block<kRows, kVectors, true>(product, fetch)
                  : multiply_block<kRows, kVectors, false>(product, fetch);
}

// At most kRowBlock rows, any number of vectors.
template <int kVectors = kVectorBlock, class Word>
void multiply(Product<Word>&& product, int rows, int64_t vectors, Fetch& fetch) {
  for (; vectors >= kVectors; vectors -= kVectors, product.w += kVectors, product.sums += kVectors) {
    multiply_rows<kVectors, kRowBlock>(product, rows, fetch);
  }
  if constexpr (kVectors > 1) {
    if (vectors > 0) multiply<kVectors - 1>(std::move(product), rows, vectors, fetch);
  }
}

// ---- keys ----

// 16 * kLanes bytes to 4 vectors whose lane j is of row j. Row 4 l + j is quarter l of rows[j].
#if defined(__AVX512F__)
inline void transpose_quads(const __m512i rows[4], Words transposed[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
  transposed[0] = (Words)_mm512_unpacklo_epi64(low01, low23);
  transposed[1] = (Words)_mm512_unpackhi_epi64(low01, low23);
  transposed[2] = (Words)_mm512_unpacklo_epi64(high01, high23);
  transposed[3] = (Words)_mm512_unpackhi_epi64(high01, high23);
}
#elif defined(__AVX2__)
inline void transpose_quads(const __m256i rows[4], Words transposed[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(rows[0], rows[1]), low23 = _mm256_unpacklo_epi32(rows[2], rows[3]);
  const __m256i high01 = _mm256_unpackhi_epi32(rows[0], rows[1]), high23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
  transposed[0] = (Words)_mm256_unpacklo_epi64(low01, low23);
  transposed[1] = (Words)_mm256_unpackhi_epi64(low01, low23);
  transposed[2] = (Words)_mm256_unpacklo_epi64(high01, high23);
  transposed[3] = (Words)_mm256_unpackhi_epi64(high01, high23);
}
#endif

// Bytes of each of kLanes rows, as many as registers take.
#if defined(__AVX512F__)
constexpr int kPartBytes = 32;
#else
constexpr int kPartBytes = 16;
#endif
constexpr int kPartWords = kPartBytes / 4;

// Such bytes as words: word i of row j goes to lane j of transposed[i].
inline __attribute__((always_inline)) void transpose(const char* const rows[kLanes], int64_t offset,
                                                     Words transposed[kPartWords]) {
#if defined(__AVX512F__)
  const auto half = [&](int row) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + offset)); };
  __m512i low[4], high[4];
  for (int j = 0; j < 4; ++j) {
    const __m512i first = _mm512_inserti64x4(_mm512_castsi256_si512(half(j)), half(4 + j), 1);
    const __m512i second = _mm512_inserti64x4(_mm512_castsi256_si512(half(8 + j)), half(12 + j), 1);
    low[j] = _mm512_shuffle_i32x4(first, second, 0x88);
    high[j] = _mm512_shuffle_i32x4(first, second, 0xdd);
  }
  transpose_quads(low, transposed);
  transpose_quads(high, transposed + 4);
#elif defined(__AVX2__)
  const auto quad = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset)); };
  __m256i quads[4];
  for (int j = 0; j < 4; ++j) quads[j] = _mm256_set_m128i(quad(4 + j), quad(j));
  transpose_quads(quads, transposed);
#else
  static_assert(kLanes == 4, "one lane per row");
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
  const Halves low = __builtin_convertvector(words & 0xffffu, Halves);
  const Halves high = __builtin_convertvector(words >> 16, Halves);
  Float16 halves[2][kLanes];
  std::memcpy(halves[0], &low, sizeof(low));
  std::memcpy(halves[1], &high, sizeof(high));
  operands[0] = bits_as<Words>(load(halves[0]));
  operands[stride] = bits_as<Words>(load(halves[1]));
}

// The first kLanes * `vectors` of a tile's keys, as operands [head_dim / kPerWord][kTileVectors].
template <class T>
void pack_keys(const T* const* keys, int64_t head_dim, int vectors, Words* packed, Fetch& fetch) {
  constexpr int kSteps = 4 / sizeof(T) / kPerWord<T>;  // of 32 bits
  for (int v = 0; v < vectors; ++v) {
    const char* const* rows = reinterpret_cast<const char* const*>(keys + v * kLanes);
    Words* target = packed + v;
    for (int64_t offset = 0; offset < head_dim * static_cast<int64_t>(sizeof(T)); offset += kPartBytes) {
      fetch.next<(kPartBytes * kLanes + 127) / 128>();  // half of what is packed
      Words words[kPartWords];
      transpose(rows, offset, words);
      for (int i = 0; i < kPartWords; ++i, target += kSteps * kTileVectors) {
        to_operands(words[i], target, kTileVectors, static_cast<const T*>(nullptr));
      }
    }
  }
}

// ---- values ----

// kPerWord rows of values that follow each other become one row of operands, in an order of dimensions that
// `to_natural_order` undoes on the sums.
template <int kVectors, class T>
inline void pack_row(const T* const* rows, int64_t dim, Words* packed) {
  static_assert(kPerWord<T> == 1, "as it lies");
  for (int v = 0; v < kVectors; ++v) packed[v] = bits_as<Words>(load(rows[0] + dim + v * kLanes));
}
template <class T>
inline void to_natural_order(Floats*, int64_t) {}

#if defined(__AVX512BF16__)
// Interleaving within quarters of a register is fast (a permutation that keeps the order takes three times as long on Zen
// 4), and deals 32 dimensions to two vectors: 0-3, 8-11, 16-19, 24-27; and 4-7, 12-15, 20-23, 28-31.
template <int kVectors>
inline void pack_row(const BFloat16* const* rows, int64_t dim, Words* packed) {
  for (int v = 0; v + 2 <= kVectors; v += 2, dim += 2 * kLanes) {
    const __m512i even = _mm512_loadu_si512(rows[0] + dim), odd = _mm512_loadu_si512(rows[1] + dim);
    packed[v] = (Words)_mm512_unpacklo_epi16(even, odd);
    packed[v + 1] = (Words)_mm512_unpackhi_epi16(even, odd);
  }
  if constexpr (kVectors % 2 == 1) {
    const Words even = bits_as<Words>(load(rows[0] + dim)), odd = bits_as<Words>(load(rows[1] + dim));
    packed[kVectors - 1] = (even >> 16) | odd;
  }
}
template <>
inline void to_natural_order<BFloat16>(Floats* sums, int64_t head_dim) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (Floats* end = sums + head_dim / (2 * kLanes) * 2; sums < end; sums += 2) {
    const __m512 low = (__m512)sums[0], high = (__m512)sums[1];
    sums[0] = (Floats)_mm512_permutex2var_ps(low, first, high);
    sums[1] = (Floats)_mm512_permutex2var_ps(low, second, high);
  }
}
#endif

// The first `num_keys` of a tile's values, as operands [num_keys / kPerWord][head_dim / kLanes].
template <class T>
void pack_values(const T* const* values, int64_t head_dim, int num_keys, Words* packed, Fetch& fetch) {
  for (int key = 0; key < num_keys; key += kPerWord<T>, packed += head_dim / kLanes) {
    int64_t dim = 0;
    for (; dim + 2 * kLanes <= head_dim; dim += 2 * kLanes) pack_row<2>(values + key, dim, packed + dim / kLanes);
    if (dim < head_dim) pack_row<1>(values + key, dim, packed + dim / kLanes);
    fetch.next<kPerWord<T>>();
  }
}

}  // namespace
}  // namespace llmstack
