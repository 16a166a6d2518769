// Linear layers over weights in panels of 64 output columns.
//
// Each output is one sum over the inputs in ascending order, held in one register lane from beginning to end, whatever the
// number of rows: so a row's result does not depend on its neighbours, and a decode equals a prefill bit for bit.
// A panel is read from memory once and stays in the second-level cache while all rows pass over it.

#include "../native/elementwise.h"
#include "../native/simd.h"
#include "../native/threads.h"

namespace llmstack {
namespace {

constexpr int kPanel = 64;  // output columns of a panel
constexpr int kVectors = kPanel / kLanes;

// Below this many products a second thread costs more than it does.
constexpr int64_t kSerialProducts = 32768;

// How weights lie in a panel: `kStep` inputs at a time, the 64 columns' weights for them after one another.
template <class T>
constexpr int kStep = 1;
template <>
constexpr int kStep<BFloat16> = 2;  // the instruction multiplies pairs

int64_t num_panels(int64_t out_features) {
  return (out_features + kPanel - 1) / kPanel;
}

template <class T>
void pack(const T* weight, T* packed, int64_t in_features, int64_t out_features) {
  const int64_t steps = (in_features + kStep<T> - 1) / kStep<T>, panel_size = steps * kStep<T> * kPanel;
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    T* out = packed + panel * panel_size;
    std::memset(static_cast<void*>(out), 0, panel_size * sizeof(T));
    for (int64_t k = 0; k < in_features; ++k) {
      for (int64_t column = 0; column < kPanel && panel * kPanel + column < out_features; ++column) {
        out[(k / kStep<T> * kPanel + column) * kStep<T> + k % kStep<T>] =
            weight[(panel * kPanel + column) * in_features + k];
      }
    }
  });
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
  explicit Column(const T* packed) : value(load(packed)) {}
};
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
  explicit Column(const BFloat16* packed) : pairs(_mm512_loadu_si512(packed)) {}
};
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
  explicit Column(const BFloat16* packed) {
    Words pairs;
    std::memcpy(&pairs, packed, sizeof(pairs));
    even = bits_as<Floats>(pairs << 16);
    odd = bits_as<Floats>(pairs & 0xffff0000u);
  }
};
inline Floats add_product(Floats sum, Input<BFloat16> x, Column<BFloat16> w) {
  return multiply_add(x.odd, w.odd, multiply_add(x.even, w.even, sum));
}
#endif

// Sums are stored after + bias, activation, + residual.
template <class T, class Out>
struct Call {
  const T* x;  // [num_rows, in_features], rows `row_stride` apart
  int64_t num_rows, row_stride;
  const T* packed;
  int64_t steps, out_features;
  const T* bias;        // [out_features] or null
  const Out* residual;  // [num_rows, out_features] or null
  Out* out;             // [num_rows, out_features]
  Activation activation;
};

template <class T, class Out>
void store_sums(const Call<T, Out>& call, int64_t row, int64_t column, Floats sums) {
  const int64_t at = row * call.out_features + column, width = call.out_features - column;
  const bool is_whole = width >= kLanes;
  const int n = static_cast<int>(width);
  if (call.bias) sums = sums + (is_whole ? load(call.bias + column) : load_first(call.bias + column, n));
  if (call.activation != Activation::kNone) sums = activate(sums, call.activation);
  if (call.residual) sums = sums + (is_whole ? load(call.residual + at) : load_first(call.residual + at, n));
  if (is_whole) {
    store(call.out + at, sums);
  } else {
    store_first(call.out + at, sums, n);
  }
}

template <class T, class Out, int kRows, int kColumnVectors>
inline void multiply_tile(const Call<T, Out>& call, int64_t row, int64_t panel, int first_vector) {
  const T* weights = call.packed + (panel * call.steps * kPanel + first_vector * kLanes) * kStep<T>;
  const T* x = call.x + row * call.row_stride;
  Floats sums[kRows][kColumnVectors] = {};
  for (int64_t k = 0; k < call.steps; ++k, weights += kStep<T> * kPanel) {
    for (int v = 0; v < kColumnVectors; ++v) __builtin_prefetch(weights + (8 * kPanel + v * kLanes) * kStep<T>);
    for (int r = 0; r < kRows; ++r) {
      const Input<T> input(x + r * call.row_stride + k * kStep<T>);
      for (int v = 0; v < kColumnVectors; ++v) {
        sums[r][v] = add_product(sums[r][v], input, Column<T>(weights + v * kLanes * kStep<T>));
      }
    }
  }
  for (int v = 0; v < kColumnVectors; ++v) {
    const int64_t column = panel * kPanel + (first_vector + v) * kLanes;
    if (column >= call.out_features) return;
    for (int r = 0; r < kRows; ++r) store_sums(call, row + r, column, sums[r][v]);
  }
}

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif

template <class T, class Out, int kRows>
void multiply_rows(const Call<T, Out>& call, int64_t row, int64_t panel) {
  for (int vector = 0; vector < kVectors; vector += kTileVectors) {
    multiply_tile<T, Out, kRows, kTileVectors>(call, row, panel, vector);
  }
}

template <class T, class Out>
void multiply_panel(const Call<T, Out>& call, int64_t row, int64_t end, int64_t panel) {
  for (; row + kTileRows <= end; row += kTileRows) multiply_rows<T, Out, kTileRows>(call, row, panel);
  switch (end - row) {
    case 5: if constexpr (kTileRows > 5) multiply_rows<T, Out, 5>(call, row, panel); break;
    case 4: if constexpr (kTileRows > 4) multiply_rows<T, Out, 4>(call, row, panel); break;
    case 3: multiply_rows<T, Out, 3>(call, row, panel); break;
    case 2: multiply_rows<T, Out, 2>(call, row, panel); break;
    case 1: multiply_rows<T, Out, 1>(call, row, panel); break;
  }
}

template <class T, class Out>
void multiply(const Call<T, Out>& call) {
  const int64_t panels = num_panels(call.out_features);
  const auto panel_of_all_rows = [&](int64_t panel) { multiply_panel(call, 0, call.num_rows, panel); };
  if (call.num_rows * call.steps * kStep<T> * call.out_features < kSerialProducts) {
    for (int64_t panel = 0; panel < panels; ++panel) panel_of_all_rows(panel);
    return;
  }
  constexpr int64_t kBlockRows = 16 * kTileRows;
  const int64_t blocks = (call.num_rows + kBlockRows - 1) / kBlockRows;
  if (blocks == 1 || panels >= 4 * num_threads()) {
    for_each_chunk(panels, panel_of_all_rows);
    return;
  }
  // Many rows and few panels: threads share a panel.
  for_each_chunk(panels * blocks, [&](int64_t chunk) {
    const int64_t row = chunk % blocks * kBlockRows;
    const int64_t end = row + kBlockRows < call.num_rows ? row + kBlockRows : call.num_rows;
    multiply_panel(call, row, end, chunk / blocks);
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_PACK(suffix, T)                                                                    \
  extern "C" void llmstack_linear_pack_##suffix(const llmstack::T* weight, llmstack::T* packed,     \
                                                int64_t in_features, int64_t out_features) {        \
    llmstack::pack(weight, packed, in_features, out_features);                                      \
  }
#define LLMSTACK_LINEAR(suffix, T, Out)                                                                             \
  extern "C" void llmstack_linear_##suffix(                                                                         \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const llmstack::T* packed, int64_t in_features,   \
      int64_t out_features, const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out,             \
      int64_t activation) {                                                                                         \
    constexpr int kStep = llmstack::kStep<llmstack::T>;                                                             \
    llmstack::multiply(llmstack::Call<llmstack::T, llmstack::Out>{                                                  \
        x, num_rows, row_stride, packed, (in_features + kStep - 1) / kStep, out_features, bias, residual, out,      \
        static_cast<llmstack::Activation>(activation)});                                                            \
  }

LLMSTACK_PACK(f32, Float32)
LLMSTACK_PACK(bf16, BFloat16)
LLMSTACK_PACK(f16, Float16)
LLMSTACK_LINEAR(f32, Float32, Float32)
LLMSTACK_LINEAR(bf16, BFloat16, BFloat16)
LLMSTACK_LINEAR(f16, Float16, Float16)
LLMSTACK_LINEAR(bf16_f32, BFloat16, Float32)
LLMSTACK_LINEAR(f16_f32, Float16, Float32)
