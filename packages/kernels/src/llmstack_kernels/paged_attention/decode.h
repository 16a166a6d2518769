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

// What a tile's products prefetch: the next tile into the second-level cache; and into the first one, just before they are
// read, the tile's values and the next one's keys. A part is read of many keys in turn, an order that costs a fifth of the
// memory's rate (measured) unless the lines have been fetched one after the other. A few at a time: a processor may drop
// what exceeds its queue.
struct Prefetches {
  Fetch keys, values, near_keys, near_values;
};

// scores[row][vector] = x[row] times the keys of the vector's lanes.
// (Not inlined: the sums then stay in registers.)
template <int kRows, int kVectors, class T>
__attribute__((noinline)) void score_block(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim,
                                           Floats* scores, Prefetches& prefetches) {
  constexpr int kTogether = kVectors < 2 ? 1 : 2;  // vectors whose sums wait for each other's
  constexpr int kSteps = kPartSteps<T>, kStepsPerWord = kSteps / kPartWords;
  constexpr int kFetchWords = kHasFewRegisters ? kPartWords : 1;  // of the part, from one prefetch to the next
  constexpr int kLines = std::max<int>(1, kPartBytes * kLanes * kTogether / 64 * kFetchWords / kPartWords);
  const char* const* rows = reinterpret_cast<const char* const*>(keys);
  const int64_t steps = head_dim / kPerWord<T>;
  Fetch far = prefetches.keys, near = prefetches.near_values;
  Floats sums[kRows][kVectors] = {};
  for (int64_t offset = 0; offset < head_dim * static_cast<int64_t>(sizeof(T)); offset += kPartBytes, x += kSteps) {
    unrolled<kVectors / kTogether>([&](auto group) __attribute__((always_inline)) {
      constexpr int kFirst = group * kTogether;
      Words words[kTogether][kPartWords];
      for (int v = 0; v < kTogether; ++v) transpose(rows + (kFirst + v) * kLanes, offset, words[v]);
      for (int i = 0; i < kPartWords; ++i) {
        if (i % kFetchWords == 0) {
          far.next<kLines>();
          near.next<kLines, 3>();
        }
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
  prefetches.keys = far;
  prefetches.near_values = near;
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

// sums[row][vector] = sums[row][vector] * factors[row] + weights[row] times the values, of `kVectors` vectors from dimension
// `dim` on.
template <int kRows, int kVectors, class T>
__attribute__((noinline)) void add_values_block(const typename Operand<T>::Word* weights, const T* const* values,
                                                int64_t dim, int num_keys, const float* factors, Floats* sums,
                                                int64_t stride, Prefetches& prefetches) {
  constexpr int64_t kWeightStride = kTileKeys / kPerWord<T>;
  constexpr int kKeys = 4;  // a fraction of the lanes
  constexpr int kFetchKeys = kHasFewRegisters ? kKeys : kPerWord<T>;  // from one prefetch to the next
  constexpr int kLines = std::max<int>(1, kFetchKeys * kVectors * kLanes * sizeof(T) / 64);
  Fetch far = prefetches.values, near = prefetches.near_keys;
  Floats local[kRows * kVectors];
  unrolled<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
    local[i] = sums[i / kVectors * stride + i % kVectors] * factors[i / kVectors];
  });
  for (int key = 0; key < num_keys; key += kKeys) {
    unrolled<kKeys / kPerWord<T>>([&](auto i) __attribute__((always_inline)) {
      if constexpr (i * kPerWord<T> % kFetchKeys == 0) {
        far.next<kLines>();
        near.next<kLines, 3>();
      }
      Words packed[kVectors];
      const T* const* rows = values + key + i * kPerWord<T>;
      if constexpr (!kHasFewRegisters) pack_row<kVectors>(rows, dim, packed);
      const auto input = [&](int r) __attribute__((always_inline)) { return weights[r * kWeightStride + i]; };
      add_products<kRows, kVectors>(local, input, [&](int v) __attribute__((always_inline)) {
        if constexpr (kHasFewRegisters) pack_row<1>(rows, dim + v * kLanes, packed + v);
        return packed[v];
      }, kAddProduct);
    });
    weights += kKeys / kPerWord<T>;
  }
  prefetches.values = far;
  prefetches.near_keys = near;
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
template <class T>
void store_stretch(const T* const* keys, int64_t begin, int64_t end, int vectors, Words* stored, Fetch& far, Fetch& near) {
  constexpr int kSteps = 4 / sizeof(T) / kPerWord<T>;  // of 32 bits
  constexpr int kLines = std::max(1, kPartBytes * kLanes / 64);
  for (int v = 0; v < vectors; ++v) {
    const char* const* rows = reinterpret_cast<const char* const*>(keys + v * kLanes);
    Words* target = stored + v;
    for (int64_t offset = begin; offset < end; offset += kPartBytes) {
      far.next<kLines>();
      near.next<kLines, 3>();
      Words words[kPartWords];
      transpose(rows, offset, words);
      for (int i = 0; i < kPartWords; ++i, target += kSteps * kTileVectors) {
        to_operands(words[i], target, kTileVectors, static_cast<const T*>(nullptr));
      }
    }
  }
}

// Scores of more rows than registers hold: a stretch of the keys is transposed once for all of them.
template <class T>
void score_stored(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int rows, int vectors,
                  Floats* scores, Words* stored, Prefetches& prefetches) {
  const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T)), x_stride = head_dim / kPerWord<T>;
  Fetch far = prefetches.keys, near = prefetches.near_values;
  for (int64_t begin = 0; begin < bytes; begin += cuts.key_stretch) {
    const int64_t end = std::min(bytes, begin + cuts.key_stretch);
    const int64_t first_step = begin * x_stride / bytes, steps = (end - begin) * x_stride / bytes;
    store_stretch(keys, begin, end, vectors, stored, far, near);
    for_each_rows(rows, [&](auto count, int row) {
      for_each_vectors<std::min(kTileVectors, loaded_vectors_beside(count))>(vectors, [&](auto width, int v) {
        add_scores_block<count, width>(x + row * x_stride + first_step, x_stride, stored + v, steps, begin == 0,
                                       scores + row * kTileVectors + v);
      });
    });
  }
  prefetches.keys = far;
  prefetches.near_values = near;
}

// scores[row][vector] = x[row] times the keys of the vector's lanes. `stored` has room for a tile's keys as operands.
template <class T>
void score(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int rows, int vectors,
           Floats* scores, Words* stored, Prefetches& prefetches) {
  if (rows >= kStoredRows) return score_stored(x, keys, head_dim, rows, vectors, scores, stored, prefetches);
  with_rows(rows, 0, [&](auto count, int) {
    for_each_vectors<std::min(4, vectors_beside(count))>(vectors, [&](auto width, int v) {
      score_block<count, width>(x, keys + v * kLanes, head_dim, scores + v, prefetches);
    });
  });
}

// sums[row] = sums[row] * factors[row] + weights[row] times the values.
template <class T>
void add_values(const typename Operand<T>::Word* weights, const T* const* values, int64_t head_dim, int rows, int num_keys,
                const float* factors, Floats* sums, Prefetches& prefetches) {
  const int vectors = static_cast<int>(head_dim / kLanes);
  for_each_rows(rows, [&](auto count, int row) {
    for_each_vectors<loaded_vectors_beside(count)>(vectors, [&](auto width, int v) {
      add_values_block<count, width>(weights + row * (kTileKeys / kPerWord<T>), values, v * kLanes, num_keys, factors + row,
                                     sums + row * vectors + v, vectors, prefetches);
    });
  });
}

}  // namespace
}  // namespace llmstack
