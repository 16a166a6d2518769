// The product of rows and a packed weight: tiles of rows and columns whose sums stay in registers.
//
// Each output is one sum over the inputs in ascending order (for quantised weights: over groups of inputs in ascending
// order, of such sums), held in one register lane from beginning to end, whatever the number of rows: so a row's result
// does not depend on its neighbours, and a decode equals a prefill bit for bit. A panel of 64 columns is read from memory
// once and stays in the second-level cache while all rows pass over it.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>
#include <vector>

#include "native_call.h"

namespace llmstack {

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

// Sums over steps of `Panel::kInputs` inputs. Their parts come one after the other, which takes fewer registers.
template <int kRows, int kColumnVectors>
struct Tile {
  Floats sums[kRows][kColumnVectors] = {};

  template <class Panel, class Ahead>
  inline void add(const Operand<typename Panel::Weight>* x, int64_t row_stride, const Panel& panel, int first_vector,
                  int64_t begin, int64_t end, Ahead& ahead) {
    using W = typename Panel::Weight;
    constexpr int kPartInputs = kStep<W> / kParts<W>, kPanelParts = Panel::kInputs / kPartInputs;
    // In an array of their own, sums stay in registers.
    if constexpr (kHasPairSums<kRows, kColumnVectors> && kParts<W> > 1) {
      Floats own[kRows][kColumnVectors];
      std::memcpy(own, sums, sizeof(own));
      for (int64_t step = begin; step < end; ++step) {
        ahead.prefetch();
        add_pairs(x + step * Panel::kInputs, row_stride, panel.packed + (step * kVectors + first_vector) * 2 * kLanes, own);
      }
      std::memcpy(sums, own, sizeof(own));
      return;
    }
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

  // The same where registers are few: GCC stores fewer sums in each step where all indices are constants.
  template <class Panel, class Ahead>
  inline void add_in_registers(const Operand<typename Panel::Weight>* x, int64_t row_stride, const Panel& panel,
                               int first_vector, int64_t begin, int64_t end, Ahead& ahead) {
    using W = typename Panel::Weight;
    constexpr int kPartInputs = kStep<W> / kParts<W>, kPanelParts = Panel::kInputs / kPartInputs;
    Floats own[kRows * kColumnVectors];
    unrolled<kRows * kColumnVectors>([&](auto i) __attribute__((always_inline)) {
      own[i] = sums[i / kColumnVectors][i % kColumnVectors];
    });
    for (int64_t step = begin; step < end; ++step) {
      ahead.prefetch();
      // (Sums have constants for indices; parts need none, and a function for each of them takes the compiler long.)
#pragma GCC unroll 8
      for (int part = 0; part < kPanelParts; ++part) {
        // Else GCC loads both halves of pairs at once, which takes registers from the sums.
        if constexpr (kParts<W> > 1) std::atomic_signal_fence(std::memory_order_seq_cst);
        const auto column = [&](int v) __attribute__((always_inline)) {
          return panel.column(step, first_vector + v).part(part);
        };
        const auto input = [&](int r) __attribute__((always_inline)) {
          return input_of(x + r * row_stride + step * Panel::kInputs + part * kPartInputs);
        };
        add_products<kRows, kColumnVectors>(own, input, column, [](Floats sum, auto x, auto w) __attribute__((always_inline)) {
          return add_product(sum, x, w);
        });
      }
    }
    unrolled<kRows * kColumnVectors>([&](auto i) __attribute__((always_inline)) {
      sums[i / kColumnVectors][i % kColumnVectors] = own[i];
    });
  }

  // The same as a function of its own. Where GCC inlines it, it stores sums in each step.
  template <class Panel, class Ahead>
  __attribute__((noinline, flatten)) void add_alone(const Operand<typename Panel::Weight>* x, int64_t row_stride, Panel panel,
                                                    int first_vector, int64_t begin, int64_t end, Ahead ahead) {
    add_in_registers(x, row_stride, panel, first_vector, begin, end, ahead);
  }

  template <class T>
  void store(const LinearCall<T>& call, int64_t row, int64_t first_column, int first_vector) {
    store_sums(call, row, kRows, first_column + first_vector * kLanes, kColumnVectors, &sums[0][0]);
  }
};

// Two and three rows of pairs, whose sums GCC stores in each step elsewhere.
template <int kRows, class W>
constexpr bool kAddsAlone = kHasFewRegisters && kParts<W> > 1 && kRows > 1 && kRows < kFourRows;

// (With all that it calls: GCC decides what it inlines by the size of the whole file, and a tile takes up to 2.8 times the
// time where it stores its sums in each step.)
template <int kRows, int kColumnVectors, class T, class Panel, class Ahead>
__attribute__((noinline, flatten)) void multiply_tile(const LinearCall<T>& call, const Panel& panel, int64_t row,
                                                      int64_t first_column, int first_vector, Ahead ahead) {
  const Operand<T>* x = call.operands + row * call.operand_stride;
  const int64_t steps = call.steps * kStep<T> / Panel::kInputs;
  Tile<kRows, kColumnVectors> tile;
  if constexpr (kAddsAlone<kRows, typename Panel::Weight>) {
    tile.add_alone(x, call.operand_stride, panel, first_vector, 0, steps, ahead);
  } else {
    tile.add(x, call.operand_stride, panel, first_vector, 0, steps, ahead);
  }
  // A copy: no other function has the address of the sums, so they stay in registers.
  Tile<kRows, kColumnVectors> whole = tile;
  whole.store(call, row, first_column, first_vector);
}

constexpr int kWideVectors = kVectors < 8 ? kVectors : 8;  // of a tile with one row

// Calls `work` with the number of a tile's rows as a constant.
template <int kMaxRows, class Work>
inline void with_rows(int64_t rows, const Work& work) {
  [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
    ((rows == kRows + 1 && (work(std::integral_constant<int, kRows + 1>()), true)) || ...);
  }(std::make_integer_sequence<int, kMaxRows>());
}

// Vectors of columns that a pass of so many rows takes.
template <int kSingle, int kOther, int kFour = kOther, int kTwo = kOther, int kThree = kOther>
struct PassWidths {
  static constexpr int of(int64_t rows) {
    switch (rows) {
      case 1:
        return kSingle;
      case 2:
        return kTwo;
      case 3:
        return kThree;
      case kFourRows:
        return kFour;
      default:
        return kOther;
    }
  }
};

// Calls `work` for each pass over kAllVectors vectors of a panel, with the tile's rows and vectors as constants, its first
// row and vector, and what is prefetched. Tiles are as few as possible, and nearly equal.
template <int kMaxRows, class Widths, int kAllVectors, bool kPrefetchesNext, class Place, class Work>
void for_each_pass(const Place& place, int64_t steps, int64_t row, int64_t end, const Work& work) {
  if (row >= end) return;
  const auto passes_of = [](int64_t rows) { return (kAllVectors + Widths::of(rows) - 1) / Widths::of(rows); };
  int64_t tiles = (end - row + kMaxRows - 1) / kMaxRows, pass = 0;
  const int64_t least = (end - row) / tiles, with_more = (end - row) % tiles;
  const int64_t passes = with_more * passes_of(least + 1) + (tiles - with_more) * passes_of(least);
  const auto pass_over = [&](auto rows, int64_t at) {
    constexpr int kColumnVectors = Widths::of(rows), kShare = kAllVectors / kColumnVectors;
    constexpr int kRest = kAllVectors % kColumnVectors;
    for (int vector = 0; vector < kAllVectors; vector += kColumnVectors, ++pass) {
      const auto pass_with = [&](auto ahead) {
        if constexpr (kRest > 0) {
          if (vector + kRest == kAllVectors) return work(rows, std::integral_constant<int, kRest>(), at, vector, ahead);
        }
        work(rows, std::integral_constant<int, kColumnVectors>(), at, vector, ahead);
      };
      if constexpr (kShare > 1) {
        pass_with(place.template next<kShare>(pass, passes, steps));
      } else if constexpr (rows == 1 && kPrefetchesNext) {
        pass_with(place.template own<1, kSingleLevel>(steps));
      } else if constexpr (rows == 1) {
        pass_with(place.template own<1, kSingleLevel>(steps, small_ahead_bytes()));
      } else if (!kPrefetchesNext || passes == 1 || passes > kManyPasses) {
        pass_with(place.template own<1, 1>(steps));
      } else if constexpr (kPrefetchesNext) {
        pass_with(place.template next<2>(pass, passes, steps));
      }
    }
  };
  for (; tiles > 0; --tiles) {
    const int64_t rows = (end - row + tiles - 1) / tiles;
    with_rows<kMaxRows>(rows, [&](auto count) { pass_over(count, row); });
    row += rows;
  }
}

// Adds the products of a stretch to `sums` [kRows, kColumnVectors]. (Not inlined: the sums then stay in registers.)
template <int kRows, int kColumnVectors, class T, class Panel, class Ahead>
__attribute__((noinline, flatten)) void add_stretch(const LinearCall<T>& call, const Panel& panel, int64_t row,
                                                    int first_vector, int64_t begin, int64_t end, Floats* sums, Ahead ahead) {
  Tile<kRows, kColumnVectors> tile;
  std::memcpy(tile.sums, sums, sizeof(tile.sums));
  const Operand<T>* x = call.operands + row * call.operand_stride;
  if constexpr (kAddsAlone<kRows, typename Panel::Weight>) {
    tile.add_alone(x, call.operand_stride, panel, first_vector, begin, end, ahead);
  } else {
    tile.add(x, call.operand_stride, panel, first_vector, begin, end, ahead);
  }
  std::memcpy(sums, tile.sums, sizeof(tile.sums));
}

// Rows of few tiles, stretch by stretch: the panel is read from memory while all of them compute. (Passes over a whole panel
// would read it in one of them, or prefetch so much that the processor drops a part.)
template <class T, class Panel>
void multiply_in_stretches(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t end, int64_t first_column) {
  constexpr int kGroups = kVectors / kTallVectors, kMostTiles = (kStretchRows + kTallRows - 1) / kTallRows * kGroups;
  struct Part {
    int64_t row, rows;
    int first_vector;
    Floats sums[kTallRows * kTallVectors];
  } parts[kMostTiles] = {};
  int64_t count = 0;
  for (int64_t tiles = (end - row + kTallRows - 1) / kTallRows; tiles > 0; --tiles) {
    const int64_t rows = (end - row + tiles - 1) / tiles;
    for (int group = 0; group < kGroups; ++group, ++count) {
      parts[count].row = row, parts[count].rows = rows, parts[count].first_vector = group * kTallVectors;
    }
    row += rows;
  }
  const int64_t steps = panel.place.steps_of(cuts.stretch);
  for (int64_t begin = 0; begin < call.steps; begin += steps) {
    const int64_t stop = begin + steps < call.steps ? begin + steps : call.steps;
    for (int64_t i = 0; i < count; ++i) {
      Part& part = parts[i];
      const auto ahead = panel.place.part_of_stretch(i, count, begin, steps);
      with_rows<kTallRows>(part.rows, [&](auto rows) {
        add_stretch<rows, kTallVectors>(call, panel, part.row, part.first_vector, begin, stop, part.sums, ahead);
      });
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Part& part = parts[i];
    const int64_t column = first_column + part.first_vector * kLanes;
    store_sums(call, part.row, static_cast<int>(part.rows), column, kTallVectors, part.sums);
  }
}

// Few rows, in stretches: tiles of 8 sums or more, since fewer wait for their products.
template <int kRows, class T, class Panel>
void multiply_few_rows(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t first_column) {
  constexpr int kWidth = kRows == 2 ? 4 : kRows == 3 ? 3 : kTileVectors, kGroups = (kVectors + kWidth - 1) / kWidth;
  constexpr int kLast = kVectors - (kGroups - 1) * kWidth;
  const auto* x = call.operands + row * call.operand_stride;
  Tile<kRows, kWidth> tiles[kGroups - 1];
  Tile<kRows, kLast> last;
  const auto for_each_tile = [&](const auto& work) {
    for (int i = 0; i + 1 < kGroups; ++i) work(tiles[i], i);
    work(last, kGroups - 1);
  };
  const int64_t steps = panel.place.steps_of(cuts.few_rows_stretch);
  for (int64_t begin = 0; begin < call.steps; begin += steps) {
    const int64_t end = begin + steps < call.steps ? begin + steps : call.steps;
    for_each_tile([&](auto& tile, int i) {
      const auto ahead = panel.place.part_of_stretch(i, kGroups, begin, steps);
      tile.add_alone(x, call.operand_stride, panel, i * kWidth, begin, end, ahead);
    });
  }
  for_each_tile([&](auto& tile, int i) { tile.store(call, row, first_column, i * kWidth); });
}

// Passes of rows [row, end) over a panel, part by part where it is longer than the second-level cache holds.
template <int kMaxRows, class Widths, class T, class Panel>
void multiply_in_passes(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t end, int64_t first_column) {
  const int64_t steps = call.steps * kStep<T> / Panel::kInputs, parts = panel.place.num_parts(end - row);
  if (parts == 1 || end - row <= kMaxRows) {
    return for_each_pass<kMaxRows, Widths, kVectors, true>(
        panel.place, steps, row, end, [&](auto rows, auto vectors, int64_t at, int vector, auto ahead) {
          multiply_tile<rows, vectors>(call, panel, at, first_column, vector, ahead);
        });
  }
  static thread_local std::vector<Floats> memory;
  memory.resize(kPartRows * kVectors);
  for (; row < end; row += kPartRows) {
    const int64_t last_row = row + kPartRows < end ? row + kPartRows : end;
    for (int64_t index = 0; index < parts; ++index) {
      const int64_t begin = steps * index / parts, stop = steps * (index + 1) / parts;
      for_each_pass<kMaxRows, Widths, kVectors, true>(
          panel.place.part(begin, stop), stop - begin, row, last_row,
          [&](auto rows, auto vectors, int64_t at, int vector, auto ahead) {
            Floats* sums = memory.data() + (at - row) * kVectors + vector * rows;
            if (index == 0) std::fill_n(sums, rows * vectors, Floats{});
            add_stretch<rows, vectors>(call, panel, at, vector, begin, stop, sums, ahead);
            if (index + 1 == parts) store_sums(call, at, rows, first_column + vector * kLanes, vectors, sums);
          });
    }
  }
}

// A single row that reads its panel past the caches.
template <class T, class Panel>
void multiply_streamed_row(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t first_column) {
  const int64_t steps = call.steps * kStep<T> / Panel::kInputs;
  const auto ahead = panel.place.template own<1, kStreamLevel>(steps);
  for (int vector = 0; vector < kVectors; vector += kWideVectors) {
    multiply_tile<1, kWideVectors>(call, panel, row, first_column, vector, ahead);
  }
}

// Rows [row, end) of one panel's columns. Pairs whose halves come one after the other take registers from the sums. Where
// registers are many, taller tiles widen a weight half as often.
template <class T, class Panel>
void multiply_panel(const LinearCall<T>& call, const Panel& panel, int64_t row, int64_t end, int64_t first_column) {
  using W = typename Panel::Weight;
  if (end - row == 1 && streams_weights.load(std::memory_order_relaxed)) {
    return multiply_streamed_row(call, panel, row, first_column);
  }
  if constexpr (kMostFewRows<T> > 0 && Panel::kInputs == kStep<T>) {
    if (end - row > 1 && end - row <= kMostFewRows<T>) {
      return with_rows<kMostFewRows<T>>(end - row, [&](auto rows) {
        if constexpr (rows > 1) multiply_few_rows<rows>(call, panel, row, first_column);
      });
    }
  }
  if constexpr (kStretchRows > 0) {
    if (end - row > kTileRows && end - row <= kStretchRows) {
      return multiply_in_stretches(call, panel, row, end, first_column);
    }
  }
  if constexpr (kTallRows > kTileRows && !std::is_same_v<W, Operand<W>>) {
    if (end - row > kTileRows) {
      return multiply_in_passes<kTallRows, PassWidths<kWideVectors, kTallVectors>>(call, panel, row, end, first_column);
    }
  }
  constexpr int kMaxRows = kParts<W> > 1 ? kPairRows : kTileRows;
  constexpr int kFourVectors = kHasFewRegisters && kParts<W> > 1 ? kFourRowsVectors : kTileVectors;
  using Widths = PassWidths<kWideVectors, kTileVectors, kFourVectors, kTileVectors, kFourVectors>;
  multiply_in_passes<kMaxRows, Widths>(call, panel, row, end, first_column);
}

}  // namespace llmstack
