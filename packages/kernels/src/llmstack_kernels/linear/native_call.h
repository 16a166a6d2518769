// One call of a linear layer: its rows and outputs, the store of sums, and the shares of threads.
#pragma once

#include <type_traits>
#include <vector>

#include "../native/elementwise.h"
#include "../native/rows.h"
#include "native_places.h"
#include "native_tile_sums.h"

namespace llmstack {

// Below this many products a second thread costs more than it does.
constexpr int64_t kSerialProducts = 32768;

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

// Lanes of a vector of columns that exist.
template <class T>
inline int lanes_of(const LinearCall<T>& call, int64_t column) {
  const int64_t width = call.out_features - column;
  return width < kLanes ? static_cast<int>(width) : kLanes;
}

template <class Out, class T>
inline void store_as(const LinearCall<T>& call, int64_t at, int n, Floats sums) {
  if (call.residual) sums = sums + load_some(static_cast<const Out*>(call.residual) + at, n);
  store_some(static_cast<Out*>(call.out) + at, sums, n);
}

// Stores what a tile has summed up, `vectors` vectors of each row. (Not inlined, and each kind of work in a loop of its own,
// so that what a call asks for is looked up once per tile.)
template <class T>
__attribute__((noinline)) void store_sums(const LinearCall<T>& call, int64_t first_row, int rows, int64_t first_column,
                                          int vectors, Floats* sums) {
  if (call.bias) {
    for (int v = 0; v < vectors; ++v) {
      const int64_t column = first_column + v * kLanes;
      if (column >= call.out_features) break;
      const Floats bias = load_some(call.bias + column, lanes_of(call, column));
      for (int r = 0; r < rows; ++r) sums[r * vectors + v] += bias;
    }
  }
  activate_all(sums, rows * vectors, call.activation);
  const auto store = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    for (int r = 0; r < rows; ++r) {
      const int64_t row = (first_row + r) * call.out_features;
      for (int v = 0; v < vectors; ++v) {
        const int64_t column = first_column + v * kLanes;
        if (column >= call.out_features) break;
        store_as<Out>(call, row + column, lanes_of(call, column), sums[r * vectors + v]);
      }
    }
  };
  call.is_out_float ? store(static_cast<float*>(nullptr)) : store(static_cast<T*>(nullptr));
}

// Rows of which so many pass over a part after the other: their sums, which wait for the next part, are 96 KiB.
constexpr int64_t kPartRows = 64 * kTileRows;

// Calls `work(part)` with calls for `part_rows` of the rows after another.
template <class T, class Work>
void for_each_part(const LinearCall<T>& call, int64_t part_rows, const Work& work) {
  const int64_t out_row_bytes = call.out_features * (call.is_out_float ? sizeof(float) : sizeof(T));
  LinearCall<T> part = call;
  for (int64_t row = 0; row < call.num_rows; row += part_rows) {
    part.num_rows = call.num_rows - row < part_rows ? call.num_rows - row : part_rows;
    part.x = call.x + row * call.row_stride;
    part.out = static_cast<char*>(call.out) + row * out_row_bytes;
    if (call.residual) part.residual = static_cast<const char*>(call.residual) + row * out_row_bytes;
    work(part);
  }
}

// The fewest rows that repay a pass over the weights.
constexpr int64_t kFewestRows = 16 * kTileRows;

// Calls `work(part)` with calls for parts of the rows, whose operands are there.
template <class T, class Work>
void with_operands(const LinearCall<T>& call, const Work& work) {
  if constexpr (std::is_same_v<T, Operand<T>>) {
    const int64_t fitting = cuts.shared_rows / (call.steps * kStep<T> * static_cast<int64_t>(sizeof(T)));
    for_each_part(call, fitting > kPartRows ? fitting : kPartRows, [&](LinearCall<T> part) {
      part.operands = part.x, part.operand_stride = call.row_stride;
      work(part);
    });
  } else {
    static thread_local std::vector<float> memory;
    const int64_t width = call.steps * kStep<T>, fitting = cuts.row_part / (width * static_cast<int64_t>(sizeof(float)));
    const int64_t stride = ((width + 15) / 16 | 1) * 16;  // an odd number of cache lines, so that rows share no set
    for_each_part(call, fitting > kFewestRows ? fitting : kFewestRows, [&](LinearCall<T> part) {
      if (static_cast<int64_t>(memory.size()) < part.num_rows * stride) memory.resize(part.num_rows * stride);
      float* operands = memory.data();  // other threads have vectors of their own
      for_each_row(part.num_rows, width, [&](int64_t r) {
        for_each_vector(width, [&](int64_t i, int n) {
          store_some(operands + r * stride + i, load_some(part.x + r * part.row_stride + i, n), n);
        });
      });
      part.operands = operands, part.operand_stride = stride;
      work(part);
    });
  }
}

// Rows that a thread takes of a panel which several share.
constexpr int64_t kBlockRows = 16 * kTileRows;

// Calls `work(panel, row, end)` for every panel and every row, shared among the threads. `row` is the first one of a block.
template <class T, class Work>
void for_each_panel(const LinearCall<T>& call, int64_t panel_bytes, const Work& work) {
  const int64_t panels = num_panels(call.out_features);
  if (call.num_rows * call.steps * kStep<T> * call.out_features < kSerialProducts) {
    for (int64_t panel = 0; panel < panels; ++panel) work(panel, 0, call.num_rows);
    return;
  }
  if (call.num_rows == 1) return for_each_in_runs(panels, panel_bytes, [&](int64_t panel) { work(panel, 0, 1); });
  const bool is_shared = panels < 4 * num_threads();  // threads share a panel, where rows are many and panels few
  const int64_t blocks = is_shared ? (call.num_rows + kBlockRows - 1) / kBlockRows : 1;
  for_each_chunk(panels * blocks, [&](int64_t chunk) {
    const int64_t row = chunk % blocks * kBlockRows, end = row + kBlockRows;
    work(chunk / blocks, row, is_shared && end < call.num_rows ? end : call.num_rows);
  });
}

}  // namespace llmstack
