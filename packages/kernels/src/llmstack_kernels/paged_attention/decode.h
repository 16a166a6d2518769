// The two products of few queries, as of a decode, with a tile that is read as it lies in the blocks.
//
// To store a tile in the layout of `operands.h` would cost more than the products. Here its parts take that layout in
// registers alone. Keys of five queries or more are an exception: they would be transposed twice. The terms of a sum and their order are those of `multiply`, and so are the bits.
#pragma once

#include <algorithm>
#include <utility>

#include "../native/cuts.h"
#include "operands.h"

namespace llmstack {
namespace {

// Queries and vectors whose sums, with a part of a tile, fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDecodeSums = 16;
#else
constexpr int kDecodeSums = 8;
#endif
constexpr int kDecodeRows = 4;

// From so many queries on, keys take their layout in memory, for all of them at once; and so many bytes of each key at a
// time (`cuts.key_stretch`) that the first-level cache holds what is stored.
constexpr int kStoredRows = kDecodeRows + 1;

// Words of operands in a part of a key.
template <class T>
constexpr int kPartSteps = kPartBytes / sizeof(T) / kPerWord<T>;

// Prefetches the keys or the values of a tile into the second-level cache: the first row of each quarter, then the second
// ones. Quarters lie in blocks, and so in pages, of their own, and memory gives four of them in turn at up to 1.7 times the
// rate of one after the other (Zen 3). Steadily, a line or two at a time: more at once wait for each other, and what computes
// waits with them. Of longer rows, a block's are a stretch of 4 KiB, which the processor prefetches by itself.
class TurnFetch {
 public:
  static constexpr bool kIsSteady = true;
  static constexpr int64_t kMostRowBytes = 128;

  TurnFetch() = default;
  template <class T>
  TurnFetch(const T* const* rows, int64_t size, const Stretch*, const Stretch*)  // kTileKeys rows of `size` numbers
      : rows_(reinterpret_cast<const char* const*>(rows)),
        row_bytes_(size * static_cast<int64_t>(sizeof(T))),
        left_(kTileKeys),
        at_(rows_[0]),
        end_(at_ + row_bytes_) {}

  // The next `kLines` cache lines, if any are left. What exceeds a row is fetched in vain.
  template <int kLines>
  inline __attribute__((always_inline)) void next() {
    if (left_ == 0) return;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + 64 * line, 0, 2);
    at_ += 64 * kLines;
    if (at_ < end_ || --left_ == 0) return;
    constexpr int kQuarter = kTileKeys / 4;
    row_ += row_ < kTileKeys - kQuarter ? kQuarter : kQuarter + 1 - kTileKeys;
    at_ = rows_[row_];
    end_ = at_ + row_bytes_;
  }

 private:
  const char* const* rows_ = nullptr;
  int64_t row_bytes_ = 0;
  int row_ = 0, left_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

// Prefetches a tile into the second-level cache; and another into the first one, just before it is read. A part is read of
// many keys in turn, an order that costs a fifth of the memory's rate (measured on Zen 4) unless the lines have been fetched
// one after the other.
class OrderedFetch {
 public:
  static constexpr bool kIsSteady = !kHasFewRegisters;

  OrderedFetch() = default;
  template <class T>
  OrderedFetch(const T* const*, int64_t, const Stretch* far, const Stretch* near)
      : far_(far == nullptr ? Fetch() : Fetch(far)), near_(near) {}

  template <int kLines>
  inline __attribute__((always_inline)) void next() {
    far_.next<kLines>();
    near_.next<kLines, 3>();
  }

 private:
  Fetch far_, near_;
};

// scores[row][vector] = x[row] times the keys of the vector's lanes.
// (Not inlined: the sums then stay in registers.)
template <int kRows, int kVectors, class T, class TileFetch>
__attribute__((noinline)) void score_block(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim,
                                           Floats* scores, TileFetch& fetch) {
  constexpr int kTogether = kVectors < 2 ? 1 : 2;  // vectors whose sums wait for each other's
  constexpr int kSteps = kPartSteps<T>, kStepsPerWord = kSteps / kPartWords;
  constexpr int kFetchWords = TileFetch::kIsSteady ? 1 : kPartWords;  // of the part, from one prefetch to the next
  constexpr int kLines = std::max<int>(1, kPartBytes * kLanes * kTogether / 64 * kFetchWords / kPartWords);
  const char* const* rows = reinterpret_cast<const char* const*>(keys);
  const int64_t steps = head_dim / kPerWord<T>;
  TileFetch next = fetch;
  Floats sums[kRows][kVectors] = {};
  for (int64_t offset = 0; offset < head_dim * static_cast<int64_t>(sizeof(T)); offset += kPartBytes, x += kSteps) {
    unrolled<kVectors / kTogether>([&](auto group) __attribute__((always_inline)) {
      constexpr int kFirst = group * kTogether;
      Words words[kTogether][kPartWords];
      for (int v = 0; v < kTogether; ++v) transpose(rows + (kFirst + v) * kLanes, offset, words[v]);
      for (int i = 0; i < kPartWords; ++i) {
        if (i % kFetchWords == 0) next.template next<kLines>();
        Words operands[kTogether][kStepsPerWord];
        for (int v = 0; v < kTogether; ++v) to_operands(words[v][i], operands[v], 1, static_cast<const T*>(nullptr));
        for (int step = 0; step < kStepsPerWord; ++step) {
          for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kTogether; ++v) {
              Floats& sum = sums[r][kFirst + v];
              sum = add_product(sum, x[r * steps + i * kStepsPerWord + step], operands[v][step]);
            }
          }
        }
      }
    });
  }
  fetch = next;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) scores[r * kTileVectors + v] = sums[r][v];
  }
}

// Calls `work` with the numbers of rows (at most kDecodeRows, nearly equal) as constants, and the first row of each.
template <int kRows = kDecodeRows, class Work>
void with_rows(int rows, int first, const Work& work) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, first, work);
  }
  work(std::integral_constant<int, kRows>(), first);
}
template <class Work>
void for_each_rows(int rows, const Work& work) {
  int groups = (rows + kDecodeRows - 1) / kDecodeRows;
  for (int first = 0, count; first < rows; first += count, --groups) {
    count = (rows - first + groups - 1) / groups;
    with_rows(count, first, work);
  }
}

// Calls `work` with numbers of vectors (at most kVectors) as constants, and the first vector of each. Four that are left
// of threes are two pairs: one vector has too few sums to hide how long a product takes.
template <int kVectors, class Work>
void for_each_vectors(int vectors, const Work& work, int first = 0) {
  for (int left; (left = vectors - first) >= kVectors && (kVectors != 3 || left != 4); first += kVectors) {
    work(std::integral_constant<int, kVectors>(), first);
  }
  if constexpr (kVectors > 1) {
    if (first < vectors) for_each_vectors<kVectors == 3 ? 2 : kVectors / 2>(vectors, work, first);
  }
}

// Vectors for which `rows` leave registers, beside a part of a tile: a power of two, so that whole tiles divide by it.
constexpr int vectors_beside(int rows) {
  return std::min(8, kDecodeSums / (rows > 2 ? 4 : rows));
}
// The same where a vector or an input is loaded at a time: with AVX2 up to 12 sums, which hide how long a product takes.
constexpr int loaded_vectors_beside(int rows) {
  return kHasFewRegisters && rows > 2 ? 12 / rows : vectors_beside(rows);
}

constexpr auto kAddProduct = [](Floats sum, auto x, Words w) __attribute__((always_inline)) { return add_product(sum, x, w); };

// Two neighbouring vectors become that of even dimensions and that of odd ones; and back. One instruction each makes floats
// of such halves of 16 bfloat16, and two of 8 neighbours.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline void deal(Floats* pair) {
  const __m256 even = _mm256_shuffle_ps((__m256)pair[0], (__m256)pair[1], 0x88);
  const __m256 odd = _mm256_shuffle_ps((__m256)pair[0], (__m256)pair[1], 0xdd);
  pair[0] = (Floats)_mm256_permute4x64_pd((__m256d)even, 0xd8);
  pair[1] = (Floats)_mm256_permute4x64_pd((__m256d)odd, 0xd8);
}
inline void to_neighbours(Floats* pair) {
  const __m256 low = _mm256_unpacklo_ps((__m256)pair[0], (__m256)pair[1]);
  const __m256 high = _mm256_unpackhi_ps((__m256)pair[0], (__m256)pair[1]);
  pair[0] = (Floats)_mm256_permute2f128_ps(low, high, 0x20);
  pair[1] = (Floats)_mm256_permute2f128_ps(low, high, 0x31);
}
#else
inline void deal(Floats*) {}
inline void to_neighbours(Floats*) {}
#endif

// sums[row][vector] = sums[row][vector] * factors[row] + weights[row] times the values, of `kVectors` vectors from dimension
// `dim` on.
template <int kRows, int kVectors, class T, class TileFetch>
__attribute__((noinline)) void add_values_block(const typename Operand<T>::Word* weights, const T* const* values,
                                                int64_t dim, int num_keys, const float* factors, Floats* sums,
                                                int64_t stride, TileFetch& fetch) {
  constexpr int64_t kWeightStride = kTileKeys / kPerWord<T>;
  constexpr int kKeys = 4;  // a fraction of the lanes
  constexpr int kFetchKeys = !TileFetch::kIsSteady ? kKeys : kHasFewRegisters && kVectors < 4 ? 2 : kPerWord<T>;  // from one prefetch to the next
  constexpr int kLines = std::max<int>(1, kFetchKeys * kVectors * kLanes * sizeof(T) / 64);
  constexpr bool kAreDealt = kHasFewRegisters && std::is_same_v<T, BFloat16> && kRows <= 2 && kVectors % 2 == 0;
  TileFetch next = fetch;
  Floats local[kRows * kVectors];
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    local[i] = sums[i / kVectors * stride + i % kVectors] * factors[i / kVectors];
  });
  if constexpr (kAreDealt) unrolled<kRows * kVectors / 2>([&](auto i) { deal(local + 2 * i); });
  for (int key = 0; key < num_keys; key += kKeys) {
    unrolled<kKeys / kPerWord<T>>([&](auto i) __attribute__((always_inline)) {
      if constexpr (i * kPerWord<T> % kFetchKeys == 0) next.template next<kLines>();
      Words packed[kVectors];
      const T* const* rows = values + key + i * kPerWord<T>;
      if constexpr (!kHasFewRegisters) pack_row<kVectors>(rows, dim, packed);
      const auto input = [&](int r) __attribute__((always_inline)) { return weights[r * kWeightStride + i]; };
      if constexpr (kAreDealt) {
        Words both;  // numbers of even dimensions in the lower halves
        add_products<kRows, kVectors>(local, input, [&](int v) __attribute__((always_inline)) {
          if (v % 2 == 0) std::memcpy(&both, rows[0] + dim + v * kLanes, sizeof(both));
          return v % 2 == 0 ? both << 16 : both & 0xffff0000u;
        }, kAddProduct);
        return;
      }
      add_products<kRows, kVectors>(local, input, [&](int v) __attribute__((always_inline)) {
        if constexpr (kHasFewRegisters) pack_row<1>(rows, dim + v * kLanes, packed + v);
        return packed[v];
      }, kAddProduct);
    });
    weights += kKeys / kPerWord<T>;
  }
  fetch = next;
  if constexpr (kAreDealt) unrolled<kRows * kVectors / 2>([&](auto i) { to_neighbours(local + 2 * i); });
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    sums[i / kVectors * stride + i % kVectors] = local[i];
  });
}

// scores[row][vector] = (0 if `is_first`, else itself) + x[row] times stored keys [steps][kTileVectors].
template <int kRows, int kVectors, class Word>
__attribute__((noinline)) void add_scores_block(const Word* x, int64_t x_stride, const Words* keys, int64_t steps,
                                                bool is_first, Floats* scores) {
  Floats sums[kRows * kVectors] = {};
  const auto score = [&](int i) __attribute__((always_inline)) -> Floats& {
    return scores[i / kVectors * kTileVectors + i % kVectors];
  };
  if (!is_first) unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) { sums[i] = score(i); });
  for (const Word* end = x + steps; x < end; ++x, keys += kTileVectors) {
    add_products<kRows, kVectors>(
        sums, [&](int r) __attribute__((always_inline)) { return x[r * x_stride]; },
        [&](int v) __attribute__((always_inline)) { return keys[v]; }, kAddProduct);
  }
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) { score(i) = sums[i]; });
}

// The bytes [begin, end) of a tile's keys as operands [steps][kTileVectors].
template <class T, class TileFetch>
void store_stretch(const T* const* keys, int64_t begin, int64_t end, int vectors, Words* stored, TileFetch& fetch) {
  constexpr int kSteps = 4 / sizeof(T) / kPerWord<T>;  // of 32 bits
  constexpr int kLines = std::max(1, kPartBytes * kLanes / 64);
  for (int v = 0; v < vectors; ++v) {
    const char* const* rows = reinterpret_cast<const char* const*>(keys + v * kLanes);
    Words* target = stored + v;
    for (int64_t offset = begin; offset < end; offset += kPartBytes) {
      fetch.template next<kLines>();
      Words words[kPartWords];
      transpose(rows, offset, words);
      for (int i = 0; i < kPartWords; ++i, target += kSteps * kTileVectors) {
        to_operands(words[i], target, kTileVectors, static_cast<const T*>(nullptr));
      }
    }
  }
}

// Scores of more rows than registers hold: a stretch of the keys is transposed once for all of them.
template <class T, class TileFetch>
void score_stored(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int rows, int vectors,
                  Floats* scores, Words* stored, TileFetch& fetch) {
  const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T)), x_stride = head_dim / kPerWord<T>;
  TileFetch next = fetch;
  for (int64_t begin = 0; begin < bytes; begin += cuts.key_stretch) {
    const int64_t end = std::min(bytes, begin + cuts.key_stretch);
    const int64_t first_step = begin * x_stride / bytes, steps = (end - begin) * x_stride / bytes;
    store_stretch(keys, begin, end, vectors, stored, next);
    for_each_rows(rows, [&](auto count, int row) {
      for_each_vectors<std::min(kTileVectors, loaded_vectors_beside(count))>(vectors, [&](auto width, int v) {
        add_scores_block<count, width>(x + row * x_stride + first_step, x_stride, stored + v, steps, begin == 0,
                                       scores + row * kTileVectors + v);
      });
    });
  }
  fetch = next;
}

// scores[row][vector] = x[row] times the keys of the vector's lanes. `stored` has room for a tile's keys as operands.
template <class T, class TileFetch>
void score(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int rows, int vectors,
           Floats* scores, Words* stored, TileFetch& fetch) {
  if (rows >= kStoredRows) return score_stored(x, keys, head_dim, rows, vectors, scores, stored, fetch);
  with_rows(rows, 0, [&](auto count, int) {
    for_each_vectors<std::min(4, vectors_beside(count))>(vectors, [&](auto width, int v) {
      score_block<count, width>(x, keys + v * kLanes, head_dim, scores + v, fetch);
    });
  });
}

// sums[row] = sums[row] * factors[row] + weights[row] times the values.
template <class T, class TileFetch>
void add_values(const typename Operand<T>::Word* weights, const T* const* values, int64_t head_dim, int rows, int num_keys,
                const float* factors, Floats* sums, TileFetch& fetch) {
  const int vectors = static_cast<int>(head_dim / kLanes);
  for_each_rows(rows, [&](auto count, int row) {
    for_each_vectors<loaded_vectors_beside(count)>(vectors, [&](auto width, int v) {
      add_values_block<count, width>(weights + row * (kTileKeys / kPerWord<T>), values, v * kLanes, num_keys, factors + row,
                                     sums + row * vectors + v, vectors, fetch);
    });
  });
}

}  // namespace
}  // namespace llmstack
