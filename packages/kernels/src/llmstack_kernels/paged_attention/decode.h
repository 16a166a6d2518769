// The two products of few queries, as of a decode, with a tile that is read as it lies in the blocks.
//
// To store a tile in the layout of `operands.h` would cost more than the products. Here its parts take that layout in
// registers alone. The terms of a sum and their order are those of `multiply`, and so are the bits.
#pragma once

#include <algorithm>
#include <utility>

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

// Calls `work` with the numbers below `kCount` as constants. (The compilers do not unroll loops with bodies as long.)
template <int kCount, class Work>
inline __attribute__((always_inline)) void unrolled(const Work& work) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) __attribute__((always_inline)) {
    (work(std::integral_constant<int, kIndices>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// scores[row][vector] = x[row] times the keys of the vector's lanes.
// (Not inlined: the sums then stay in registers.)
template <int kRows, int kVectors, class T>
__attribute__((noinline)) void score_block(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim,
                                           Floats* scores, Prefetches& prefetches) {
  constexpr int kTogether = kVectors < 2 ? 1 : 2;  // vectors whose sums wait for each other's
  constexpr int kSteps = kPartSteps<T>, kStepsPerWord = kSteps / kPartWords;
  constexpr int kLines = std::max<int>(1, kPartBytes * kLanes * kTogether / 64 / kPartWords);
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
        far.next<kLines>();
        near.next<kLines, 3>();
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

// sums[row][vector] = sums[row][vector] * factors[row] + weights[row] times the values, of `kVectors` vectors from dimension
// `dim` on.
template <int kRows, int kVectors, class T>
__attribute__((noinline)) void add_values_block(const typename Operand<T>::Word* weights, const T* const* values,
                                                int64_t dim, int num_keys, const float* factors, Floats* sums,
                                                int64_t stride, Prefetches& prefetches) {
  constexpr int64_t kWeightStride = kTileKeys / kPerWord<T>;
  constexpr int kKeys = 4;  // a fraction of the lanes
  constexpr int kLines = std::max<int>(1, kPerWord<T> * kVectors * kLanes * sizeof(T) / 64);
  Fetch far = prefetches.values, near = prefetches.near_keys;
  Floats local[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) local[r][v] = sums[r * stride + v] * factors[r];
  }
  for (int key = 0; key < num_keys; key += kKeys) {
    for (int i = 0; i < kKeys; i += kPerWord<T>, ++weights) {
      far.next<kLines>();
      near.next<kLines, 3>();
      Words packed[kVectors];
      pack_row<kVectors>(values + key + i, dim, packed);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) local[r][v] = add_product(local[r][v], weights[r * kWeightStride], packed[v]);
      }
    }
  }
  prefetches.values = far;
  prefetches.near_keys = near;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r * stride + v] = local[r][v];
  }
}

template <int kRows, int kVectors, class T>
void score_vectors(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int vectors, Floats* scores,
                   Prefetches& prefetches) {
  for (; vectors >= kVectors; vectors -= kVectors, keys += kVectors * kLanes, scores += kVectors) {
    score_block<kRows, kVectors>(x, keys, head_dim, scores, prefetches);
  }
  if constexpr (kVectors > 1) {
    if (vectors > 0) score_vectors<kRows, kVectors / 2>(x, keys, head_dim, vectors, scores, prefetches);
  }
}

template <int kRows, int kVectors, class T>
void add_value_vectors(const typename Operand<T>::Word* weights, const T* const* values, int64_t dim, int64_t head_dim,
                       int num_keys, const float* factors, Floats* sums, Prefetches& prefetches) {
  const int64_t stride = head_dim / kLanes;
  for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes) {
    add_values_block<kRows, kVectors>(weights, values, dim, num_keys, factors, sums + dim / kLanes, stride, prefetches);
  }
  if constexpr (kVectors > 1) {
    if (dim < head_dim) {
      add_value_vectors<kRows, kVectors / 2>(weights, values, dim, head_dim, num_keys, factors, sums, prefetches);
    }
  }
}

// Vectors for which `rows` leave registers: a power of two, so that whole tiles and most heads divide by it.
constexpr int vectors_beside(int rows) {
  return std::min(8, kDecodeSums / (rows > 2 ? 4 : rows));
}

// At most kDecodeRows rows.
template <int kRows = kDecodeRows, class T>
void score(const typename Operand<T>::Word* x, const T* const* keys, int64_t head_dim, int rows, int vectors,
           Floats* scores, Prefetches& prefetches) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return score<kRows - 1>(x, keys, head_dim, rows, vectors, scores, prefetches);
  }
  score_vectors<kRows, std::min(4, vectors_beside(kRows))>(x, keys, head_dim, vectors, scores, prefetches);
}

template <int kRows = kDecodeRows, class T>
void add_values(const typename Operand<T>::Word* weights, const T* const* values, int64_t head_dim, int rows, int num_keys,
                const float* factors, Floats* sums, Prefetches& prefetches) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return add_values<kRows - 1>(weights, values, head_dim, rows, num_keys, factors, sums, prefetches);
  }
  add_value_vectors<kRows, vectors_beside(kRows)>(weights, values, 0, head_dim, num_keys, factors, sums, prefetches);
}

}  // namespace
}  // namespace llmstack
