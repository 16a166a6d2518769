// The product of rows and a packed weight: tiles of rows and columns whose sums stay in registers.
//
// Each output is one sum over the inputs in ascending order (for quantised weights: over groups of inputs in ascending
// order, of such sums), held in one register lane from beginning to end, whatever the number of rows: so a row's result
// does not depend on its neighbours, and a decode equals a prefill bit for bit. A panel of 64 columns is read from memory
// once and stays in the second-level cache while all rows pass over it.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

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

// What products are made of: bfloat16 where the processor multiplies it, else floats, to which inputs are widened.
template <class T>
struct OperandOf {
  using Type = float;
};

// Inputs of a step that are multiplied one after the other.
template <class T>
constexpr int kParts = kStep<T>;

// One part of a step's inputs of a row in every lane, that part of the weights of kLanes columns, and their products.
struct Input {
  Floats value;
  explicit Input(const float* x) : value(broadcast(*x)) {}
};
inline Floats add_product(Floats sum, Input x, Floats w) {
  return multiply_add(x.value, w, sum);
}

template <class T>
struct Column {
  Floats value;
  Floats part(int) const { return value; }
};
template <class T>
inline Column<T> load_column(const T* packed) {
  return {load(packed)};
}

#if defined(__AVX512BF16__)
template <>
struct OperandOf<BFloat16> {
  using Type = BFloat16;
};
template <>
constexpr int kParts<BFloat16> = 1;

struct InputPair {
  __m512i pair;
  explicit InputPair(const BFloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    pair = _mm512_set1_epi32(bits);
  }
};
inline Floats add_product(Floats sum, InputPair x, __m512i w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.pair, (__m512bh)w);
}
template <>
struct Column<BFloat16> {
  __m512i pairs;
  __m512i part(int) const { return pairs; }
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  return {_mm512_loadu_si512(packed)};
}
inline InputPair input_of(const BFloat16* x) {
  return InputPair(x);
}
#else
template <>
struct Column<BFloat16> {
  Floats even, odd;
  Floats part(int index) const { return index == 0 ? even : odd; }
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  Words pairs;
  std::memcpy(&pairs, packed, sizeof(pairs));
  return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & 0xffff0000u)};
}
#endif
inline Input input_of(const float* x) {
  return Input(x);
}

template <class T>
using Operand = typename OperandOf<T>::Type;

// What is prefetched while a tile is computed. Where a panel is passed over once, that is its own memory. Else each pass
// prefetches a share of the thread's next panel: so memory is read during all passes, not in the first one alone.
template <int kLines, int kLevel>
struct Ahead {
  const uint8_t* at;
  int64_t stride;  // from step to step

  void prefetch() {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at + 64 * line, 0, 4 - kLevel);
    at += stride;
  }
};
constexpr int64_t kAheadBytes = 4096;

// Where a single row's step takes few instructions, more lines are under way to the second level (1.1 times the speed).
#if defined(__AVX512BF16__)
constexpr int kSingleLevel = 2;
#else
constexpr int kSingleLevel = 1;
#endif

// With more passes, reading takes so little of the time that a second panel in the cache costs more.
constexpr int64_t kManyPasses = 8;

// The memory of a panel, and the distance to the one that this thread is likely to compute next.
template <int kStepBytes>
struct Place {
  const uint8_t* start;
  int64_t bytes, distance;

  static Place of(const void* packed, int64_t index, int64_t steps) {
    const int64_t bytes = steps * kStepBytes;
    return {static_cast<const uint8_t*>(packed) + index * bytes, bytes, bytes * num_threads()};
  }
  // A part of the next panel, for passes over weights that were read before.
  template <int kCount>
  Place<kStepBytes / kCount> part_of_next(int64_t index) const {
    return {start + distance + bytes / kCount * index, bytes / kCount, 0};
  }
  // For pass `pass` of `passes`, of which there are kShare at least, what it needs itself or of the next panel.
  template <int kShare, int kLevel>
  Ahead<(kStepBytes / kShare + 63) / 64, kLevel> own(int64_t steps) const {
    return {start + kAheadBytes, bytes / steps};
  }
  template <int kShare>
  Ahead<(kStepBytes / kShare + 63) / 64, 2> next(int64_t pass, int64_t passes, int64_t steps) const {
    return {start + distance + bytes / passes * pass, (bytes / passes + steps - 1) / steps};
  }
};

// Weights as they are: a step of inputs at a time, the 64 columns' weights for them after one another.
template <class T>
struct PlainWeights {
  const T* packed;
  int64_t steps;

  struct Panel {
    using Weight = T;
    static constexpr int kInputs = kStep<T>;
    const T* packed;
    Place<kPanel * kStep<T> * sizeof(T)> place;
    Column<T> column(int64_t step, int vector) const {
      return load_column(packed + (step * kPanel + vector * kLanes) * kStep<T>);
    }
  };
  Panel panel(int64_t index) const {
    return {packed + index * steps * kPanel * kStep<T>, decltype(Panel::place)::of(packed, index, steps)};
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
  const Operand<T>* operands = nullptr;  // `x` as products take it, rows `operand_stride` apart: see `with_operands`
  int64_t operand_stride = 0;
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

// Sums over steps of `Panel::kInputs` inputs. Their parts come one after the other, which takes fewer registers.
template <int kRows, int kColumnVectors>
struct Tile {
  Floats sums[kRows][kColumnVectors] = {};

  template <class Panel, class Ahead>
  inline void add(const Operand<typename Panel::Weight>* x, int64_t row_stride, const Panel& panel, int first_vector,
                  int64_t begin, int64_t end, Ahead& ahead) {
    using W = typename Panel::Weight;
    constexpr int kPartInputs = kStep<W> / kParts<W>, kPanelParts = Panel::kInputs / kPartInputs;
    for (int64_t step = begin; step < end; ++step) {
      ahead.prefetch();
#pragma GCC unroll 8
      for (int part = 0; part < kPanelParts; ++part) {
        const auto column = [&](int v) { return panel.column(step, first_vector + v).part(part); };
        const auto input = [&](int r) {
          return input_of(x + r * row_stride + step * Panel::kInputs + part * kPartInputs);
        };
        if constexpr (kRows == 1) {  // the order that takes fewer registers
          const auto only = input(0);
          for (int v = 0; v < kColumnVectors; ++v) sums[0][v] = add_product(sums[0][v], only, column(v));
        } else {
          decltype(column(0)) columns[kColumnVectors];
          for (int v = 0; v < kColumnVectors; ++v) columns[v] = column(v);
          for (int r = 0; r < kRows; ++r) {
            const auto own = input(r);
            for (int v = 0; v < kColumnVectors; ++v) sums[r][v] = add_product(sums[r][v], own, columns[v]);
          }
        }
      }
    }
  }

  template <class T>
  void store(const LinearCall<T>& call, int64_t row, int64_t first_column, int first_vector) const {
    for (int v = 0; v < kColumnVectors; ++v) {
      const int64_t column = first_column + (first_vector + v) * kLanes;
      if (column >= call.out_features) return;
      for (int r = 0; r < kRows; ++r) store_sums(call, row + r, column, sums[r][v]);
    }
  }
};

template <int kRows, int kColumnVectors, class T, class Panel, class Ahead>
inline void multiply_tile(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t first_column,
                          int first_vector, Ahead ahead) {
  const Operand<T>* x = call.operands + row * call.operand_stride;
  const int64_t steps = call.steps * kStep<T> / Panel::kInputs;
  Tile<kRows, kColumnVectors> tile;
  tile.add(x, call.operand_stride, panel, first_vector, 0, steps, ahead);
  tile.store(call, row, first_column, first_vector);
}

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold sums
constexpr int kPairRows = kTileRows;
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
constexpr int kPairRows = 4;  // of a tile whose weights are in pairs, both halves of which take registers
#endif
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int kTallRows = 12, kTallVectors = 2;  // of a tile whose weights are widened
#else
constexpr int kTallRows = kTileRows, kTallVectors = kTileVectors;
#endif
constexpr int64_t kTallInputs = 4096;  // with more, the rows of a tall tile take too much of the second-level cache
constexpr int kWideVectors = kVectors < 8 ? kVectors : 8;  // of a tile with one row

// Calls `work` for each pass over kAllVectors vectors of a panel, with the tile's rows and vectors as constants, its first
// row and vector, and what is prefetched. Tiles are as few as possible, and nearly equal. A single row takes
// kSingleVectors vectors.
template <int kMaxRows, int kSingleVectors, int kAllVectors, bool kPrefetchesNext, int kPassVectors = kTileVectors,
          class Place, class Work>
void for_each_pass(const Place& place, int64_t steps, int64_t row, int64_t end, const Work& work) {
  int64_t tiles = (end - row + kMaxRows - 1) / kMaxRows, pass = 0;
  const int64_t passes = tiles * (kAllVectors / (end - row == 1 ? kSingleVectors : kPassVectors));
  const auto pass_over = [&](auto rows, int64_t at) {
    constexpr int kColumnVectors = rows == 1 ? kSingleVectors : kPassVectors, kShare = kAllVectors / kColumnVectors;
    for (int vector = 0; vector < kAllVectors; vector += kColumnVectors, ++pass) {
      const auto pass_with = [&](auto ahead) {
        work(rows, std::integral_constant<int, kColumnVectors>(), at, vector, ahead);
      };
      if constexpr (kShare > 1) {
        pass_with(place.template next<kShare>(pass, passes, steps));
      } else if constexpr (rows == 1) {
        pass_with(place.template own<1, kSingleLevel>(steps));
      } else if (!kPrefetchesNext || passes == 1 || passes > kManyPasses) {
        pass_with(place.template own<1, 1>(steps));
      } else if constexpr (kPrefetchesNext) {
        pass_with(place.template next<2>(pass, passes, steps));
      }
    }
  };
  for (; tiles > 0; --tiles) {
    const int64_t rows = (end - row + tiles - 1) / tiles;
    [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
      ((rows == kRows + 1 && (pass_over(std::integral_constant<int, kRows + 1>(), row), true)) || ...);
    }(std::make_integer_sequence<int, kMaxRows>());
    row += rows;
  }
}

// Rows [row, end) of one panel's columns. Pairs whose halves come one after the other take registers from the sums. Where
// registers are many, taller tiles widen a weight half as often.
template <class T, class Panel>
void multiply_panel(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t end, int64_t first_column) {
  using W = typename Panel::Weight;
  const auto work = [&](auto rows, auto vectors, int64_t at, int vector, auto ahead) {
    multiply_tile<rows, vectors>(call, panel, at, first_column, vector, ahead);
  };
  if constexpr (kTallRows > kTileRows && !std::is_same_v<W, Operand<W>>) {
    if (end - row > kTileRows && call.steps * kStep<W> <= kTallInputs) {
      for_each_pass<kTallRows, kWideVectors, kVectors, true, kTallVectors>(panel.place, call.steps, row, end, work);
      return;
    }
  }
  constexpr int kMaxRows = kParts<W> > 1 ? kPairRows : kTileRows;
  for_each_pass<kMaxRows, kWideVectors, kVectors, true>(panel.place, call.steps, row, end, work);
}

// Rows whose operands fit into some 512 KiB, and the fewest that repay a pass over the weights.
constexpr int64_t kOperandNumbers = 1 << 17;
constexpr int64_t kFewestRows = 16 * kTileRows;

// Calls `work(part)` with calls for parts of the rows, whose operands are there.
template <class T, class Work>
void with_operands(const LinearCall<T>& call, const Work& work) {
  LinearCall<T> part = call;
  if constexpr (std::is_same_v<T, Operand<T>>) {
    part.operands = call.x, part.operand_stride = call.row_stride;
    work(part);
  } else {
    static thread_local std::vector<float> memory;
    const int64_t width = call.steps * kStep<T>, fitting = kOperandNumbers / width;
    const int64_t stride = ((width + 15) / 16 | 1) * 16;  // an odd number of cache lines, so that rows share no set
    const int64_t part_rows = fitting > kFewestRows ? fitting : kFewestRows;
    const int64_t out_row_bytes = call.out_features * (call.is_out_float ? sizeof(float) : sizeof(T));
    for (int64_t row = 0; row < call.num_rows; row += part_rows) {
      part.num_rows = call.num_rows - row < part_rows ? call.num_rows - row : part_rows;
      part.x = call.x + row * call.row_stride;
      part.out = static_cast<char*>(call.out) + row * out_row_bytes;
      if (call.residual) part.residual = static_cast<const char*>(call.residual) + row * out_row_bytes;
      const int64_t size = part.num_rows * stride;
      if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
      float* operands = memory.data();  // other threads have vectors of their own
      for_each_row(part.num_rows, width, [&](int64_t r) {
        for_each_vector(width, [&](int64_t i, int n) {
          store_some(operands + r * stride + i, load_some(part.x + r * part.row_stride + i, n), n);
        });
      });
      part.operands = operands, part.operand_stride = stride;
      work(part);
    }
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
