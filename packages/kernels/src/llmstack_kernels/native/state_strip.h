// A strip of the columns of a head's matrix, which changes token by token.
//
// The columns of a matrix do not depend on each other, so a strip of them stays in the first cache for all tokens of a row
// of the step (128 rows of 64 columns: 32 KiB).
#pragma once

#include <cmath>

#include "rows.h"

namespace llmstack {

constexpr int kStripVectors = kHasFewRegisters ? 2 : 4;  // of a strip: with as many of each, three sums fit into the registers
constexpr int64_t kStrip = kStripVectors * kLanes;
constexpr int64_t kMaxStateRows = 256;  // as in native.py of the operations

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The factor of a row of the matrix: the same for all, or one of each.
inline Floats decay_of(Floats decay, int64_t) { return decay; }
inline Floats decay_of(const float* decays, int64_t row) { return broadcast(decays[row]); }

struct Strip {
  float columns[kMaxStateRows * kStrip];
  Floats predicted[kStripVectors];  // what predicts the next token, times the columns
  Floats out[kStripVectors];

  // Copies up to kStrip columns of a matrix; the others are 0.
  void load_from(const float* matrix, int64_t num_rows, int64_t num_columns, int64_t count) {
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int v = 0; v < kStripVectors; ++v) store(columns + i * kStrip + v * kLanes, vector(matrix + i * num_columns, v, count));
    }
  }
  void store_to(float* matrix, int64_t num_rows, int64_t num_columns, int64_t count) const {
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int v = 0; v < kStripVectors; ++v) {
        const int64_t rest = count - v * kLanes;
        if (rest <= 0) break;
        const Floats x = load(columns + i * kStrip + v * kLanes);
        store_some(matrix + i * num_columns + v * kLanes, x, rest < kLanes ? static_cast<int>(rest) : kLanes);
      }
    }
  }
  template <class T>
  static Floats vector(const T* x, int v, int64_t count) {
    const int64_t rest = count - v * kLanes;
    return rest >= kLanes ? load(x + v * kLanes) : rest > 0 ? load_first(x + v * kLanes, static_cast<int>(rest)) : Floats{};
  }

  void predict(const float* key, int64_t num_rows) {
    Floats sums[kStripVectors] = {};
    for (int64_t i = 0; i < num_rows; ++i) {
      const Floats factor = broadcast(key[i]);
      unrolled<kStripVectors>([&](auto v) __attribute__((always_inline)) {
        sums[v] = multiply_add(factor, load(columns + i * kStrip + v * kLanes), sums[v]);
      });
    }
    for (int v = 0; v < kStripVectors; ++v) predicted[v] = sums[v];
  }

  // One token, and the prediction for the next one in the same pass over the columns.
  template <bool kHasNext, class Decay>
  void learn(const float* query, const float* key, const float* next_key, Decay decay, const Floats* change,
             int64_t num_rows) {
    Floats outs[kStripVectors] = {}, sums[kStripVectors] = {}, own[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) own[v] = change[v];
    for (int64_t i = 0; i < num_rows; ++i) {
      const Floats asked = broadcast(query[i]), learnt = broadcast(key[i]);
      const Floats next = broadcast(kHasNext ? next_key[i] : 0.0f), factor = decay_of(decay, i);
      float* line = columns + i * kStrip;
      unrolled<kStripVectors>([&](auto v) __attribute__((always_inline)) {
        const Floats updated = multiply_add(learnt, own[v], load(line + v * kLanes) * factor);
        store(line + v * kLanes, updated);
        outs[v] = multiply_add(asked, updated, outs[v]);
        if constexpr (kHasNext) sums[v] = multiply_add(next, updated, sums[v]);
      });
    }
    for (int v = 0; v < kStripVectors; ++v) out[v] = outs[v], predicted[v] = sums[v];
  }
};

}  // namespace llmstack
