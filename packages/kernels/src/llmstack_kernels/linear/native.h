// The product of rows and a packed weight: tiles of rows and columns whose sums stay in registers.
//
// Each output is one sum over the inputs in ascending order (for quantised weights: over groups of inputs in ascending
// order, of such sums), held in one register lane from beginning to end, whatever the number of rows: so a row's result
// does not depend on its neighbours, and a decode equals a prefill bit for bit. A panel of 64 columns is read from memory
// once and stays in the second-level cache while all rows pass over it.
#pragma once

#include "../native/elementwise.h"
#include "../native/rows.h"

namespace llmstack {

constexpr int kPanel = 64;  // output columns of a panel
constexpr int kVectors = kPanel / kLanes;

// Below this many products a second thread costs more than it does.
constexpr int64_t kSerialProducts = 32768;

// Inputs that one instruction takes.
template <class T>
constexpr int kStep = 1;
template <>
constexpr int kStep<BFloat16> = 2;

template <class T>
constexpr int64_t num_steps(int64_t in_features) {
  return (in_features + kStep<T> - 1) / kStep<T>;
}

inline int64_t num_panels(int64_t out_features) {
  return (out_features + kPanel - 1) / kPanel;
}

// One step of inputs of a row in every lane, one step of weights of kLanes columns, and their products.
template <class T>
struct Input {
  Floats value;
  explicit Input(const T* x) : value(broadcast(to_float(*x))) {}
};
template <class T>
struct Column {
  Floats value;
};
template <class T>
inline Column<T> load_column(const T* packed) {
  return {load(packed)};
}
template <class T>
inline Floats add_product(Floats sum, Input<T> x, Column<T> w) {
  return multiply_add(x.value, w.value, sum);
}

#if defined(__AVX512BF16__)
template <>
struct Input<BFloat16> {
  __m512i pair;
  explicit Input(const BFloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    pair = _mm512_set1_epi32(bits);
  }
};
template <>
struct Column<BFloat16> {
  __m512i pairs;
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  return {_mm512_loadu_si512(packed)};
}
inline Floats add_product(Floats sum, Input<BFloat16> x, Column<BFloat16> w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.pair, (__m512bh)w.pairs);
}
#else
template <>
struct Input<BFloat16> {
  Floats even, odd;
  explicit Input(const BFloat16* x) : even(broadcast(to_float(x[0]))), odd(broadcast(to_float(x[1]))) {}
};
template <>
struct Column<BFloat16> {
  Floats even, odd;
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  Words pairs;
  std::memcpy(&pairs, packed, sizeof(pairs));
  return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & 0xffff0000u)};
}
inline Floats add_product(Floats sum, Input<BFloat16> x, Column<BFloat16> w) {
  return multiply_add(x.odd, w.odd, multiply_add(x.even, w.even, sum));
}
#endif

// How far ahead of the sums weights are asked for.
constexpr int64_t kPrefetchBytes = 2048;

inline void prefetch_lines(const uint8_t* p, int64_t num_bytes) {
  for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(p + line);
}

// Weights as they are: a step of inputs at a time, the 64 columns' weights for them after one another.
template <class T>
struct PlainWeights {
  const T* packed;
  int64_t steps;

  struct Panel {
    static constexpr bool kHasScales = false;
    const T* packed;
    Column<T> column(int64_t step, int vector) const {
      return load_column(packed + (step * kPanel + vector * kLanes) * kStep<T>);
    }
    void prefetch(int64_t step) const {
      const T* at = packed + step * kPanel * kStep<T>;
      prefetch_lines(reinterpret_cast<const uint8_t*>(at) + kPrefetchBytes, kPanel * kStep<T> * sizeof(T));
    }
  };
  Panel panel(int64_t index) const {
    return {packed + index * steps * kPanel * kStep<T>};
  }
};

// Sums are stored after + bias, activation, + residual: as floats or as T, which is asked when they are stored. Tiles of
// their own for each would double what the compiler has to do.
template <class T>
struct LinearCall {
  const T* x;  // [num_rows, in_features], rows `row_stride` apart
  int64_t num_rows, row_stride;
  int64_t steps, out_features;
  const T* bias;         // [out_features] or null
  const void* residual;  // [num_rows, out_features] or null
  void* out;             // [num_rows, out_features]
  bool is_out_float;     // and the residual's type with it
  Activation activation;
};

template <class Out, class T>
void store_as(const LinearCall<T>& call, int64_t at, int n, Floats sums) {
  if (call.residual) sums = sums + load_some(static_cast<const Out*>(call.residual) + at, n);
  store_some(static_cast<Out*>(call.out) + at, sums, n);
}

template <class T>
void store_sums(const LinearCall<T>& call, int64_t row, int64_t column, Floats sums) {
  const int64_t width = call.out_features - column;
  const int n = width < kLanes ? static_cast<int>(width) : kLanes;
  if (call.bias) sums = sums + load_some(call.bias + column, n);
  if (call.activation != Activation::kNone) sums = activate(sums, call.activation);
  const int64_t at = row * call.out_features + column;
  if (call.is_out_float) {
    store_as<float>(call, at, n, sums);
  } else {
    store_as<T>(call, at, n, sums);
  }
}

template <int kRows, int kColumnVectors>
struct Tile {
  Floats sums[kRows][kColumnVectors] = {};

  template <class T, class Panel>
  inline void add(const T* x, int64_t row_stride, const Panel& panel, int first_vector, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      panel.prefetch(step);
      Column<T> columns[kColumnVectors];
      for (int v = 0; v < kColumnVectors; ++v) columns[v] = panel.column(step, first_vector + v);
      for (int r = 0; r < kRows; ++r) {
        const Input<T> input(x + r * row_stride + step * kStep<T>);
        for (int v = 0; v < kColumnVectors; ++v) sums[r][v] = add_product(sums[r][v], input, columns[v]);
      }
    }
  }
};

template <int kRows, int kColumnVectors, class T, class Panel>
inline void multiply_tile(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t first_column,
                          int first_vector) {
  const T* x = call.x + row * call.row_stride;
  Tile<kRows, kColumnVectors> tile;
  if constexpr (Panel::kHasScales) {
    for (int64_t group = 0; group < panel.num_groups; ++group) {
      Tile<kRows, kColumnVectors> partial;
      const int64_t begin = group * panel.group_steps, end = begin + panel.group_steps;
      const auto& own = panel.in_group(group, first_vector);
      partial.add(x, call.row_stride, own, first_vector, begin, end < call.steps ? end : call.steps);
      for (int v = 0; v < kColumnVectors; ++v) {
        const Floats scale = panel.scale(group, first_vector + v);
        for (int r = 0; r < kRows; ++r) tile.sums[r][v] = multiply_add(partial.sums[r][v], scale, tile.sums[r][v]);
      }
    }
  } else {
    tile.add(x, call.row_stride, panel, first_vector, 0, call.steps);
  }
  for (int v = 0; v < kColumnVectors; ++v) {
    const int64_t column = first_column + (first_vector + v) * kLanes;
    if (column >= call.out_features) return;
    for (int r = 0; r < kRows; ++r) store_sums(call, row + r, column, tile.sums[r][v]);
  }
}

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif

template <int kRows, class T, class Panel>
void multiply_rows(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t first_column) {
  for (int vector = 0; vector < kVectors; vector += kTileVectors) {
    multiply_tile<kRows, kTileVectors>(call, panel, row, first_column, vector);
  }
}

// Rows [row, end) of one panel's columns.
template <class T, class Panel>
void multiply_panel(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t end,
                    int64_t first_column) {
  for (; row + kTileRows <= end; row += kTileRows) multiply_rows<kTileRows>(call, panel, row, first_column);
  switch (end - row) {
    case 5: if constexpr (kTileRows > 5) multiply_rows<5>(call, panel, row, first_column); break;
    case 4: if constexpr (kTileRows > 4) multiply_rows<4>(call, panel, row, first_column); break;
    case 3: multiply_rows<3>(call, panel, row, first_column); break;
    case 2: multiply_rows<2>(call, panel, row, first_column); break;
    case 1: multiply_rows<1>(call, panel, row, first_column); break;
  }
}

// Calls `work(panel, row, end)` for every panel and every row, shared among the threads.
template <class T, class Work>
void for_each_panel(const LinearCall<T>& call, const Work& work) {
  const int64_t panels = num_panels(call.out_features);
  if (call.num_rows * call.steps * kStep<T> * call.out_features < kSerialProducts) {
    for (int64_t panel = 0; panel < panels; ++panel) work(panel, 0, call.num_rows);
    return;
  }
  constexpr int64_t kBlockRows = 16 * kTileRows;
  const bool is_shared = panels < 4 * num_threads();  // threads share a panel, where rows are many and panels few
  const int64_t blocks = is_shared ? (call.num_rows + kBlockRows - 1) / kBlockRows : 1;
  for_each_chunk(panels * blocks, [&](int64_t chunk) {
    const int64_t row = chunk % blocks * kBlockRows, end = row + kBlockRows;
    work(chunk / blocks, row, is_shared && end < call.num_rows ? end : call.num_rows);
  });
}

}  // namespace llmstack
