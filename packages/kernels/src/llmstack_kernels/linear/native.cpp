// Linear layers over weights as they are.

#include "../native/repeat.h"
#include "native.h"

namespace llmstack {

std::atomic<bool> streams_weights{false};

namespace {

template <class T>
void pack(const T* weight, T* packed, int64_t in_features, int64_t out_features) {
  const int64_t panel_size = num_steps<T>(in_features) * kStep<T> * kPanel;
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

// Weights that are not multiplied as they are can be widened once for all tiles. That pays without instructions that widen.
#if defined(__AVX2__)
constexpr bool kWidensOnce = false;
#else
constexpr bool kWidensOnce = true;
#endif
constexpr int64_t kDirectRows = 4 * kTileRows;

// Weights of some columns as floats: [inputs, kTileVectors], kStep<T> inputs at a time.
template <class T>
struct WideColumns {
  using Weight = float;
  static constexpr int kInputs = kStep<T>;
  const Floats* columns;

  struct Step {
    const Floats* first;
    Floats part(int index) const { return first[index * kTileVectors]; }
  };
  Step column(int64_t step, int vector) const { return {columns + step * kInputs * kTileVectors + vector}; }
};

template <class T>
void multiply_widened(const LinearCall<T>& call, const typename PlainWeights<T>::Panel& panel, int64_t first_row,
                      int64_t end, int64_t first_column) {
  static thread_local std::vector<Floats> memory;
  const int64_t inputs = call.steps * kStep<T>;
  memory.resize(inputs * kTileVectors);
  for (int vector = 0; vector < kVectors; vector += kTileVectors) {
    Floats* columns = memory.data();
    for (int64_t step = 0; step < call.steps; ++step, columns += kStep<T> * kTileVectors) {
      for (int v = 0; v < kTileVectors; ++v) {
        const Column<T> column = panel.column(step, vector + v);
        for (int i = 0; i < kStep<T>; ++i) columns[i * kTileVectors + v] = column.part(i);
      }
    }
    const WideColumns<T> wide{memory.data()};
    const auto place = panel.place.template part_of_next<kVectors / kTileVectors>(vector / kTileVectors);
    for_each_pass<kTileRows, PassWidths<kTileVectors, kTileVectors>, kTileVectors, true>(
        place, call.steps, first_row, end, [&](auto rows, auto vectors, int64_t row, int, auto ahead) {
          multiply_tile<rows, vectors>(call, wide, row, first_column + vector * kLanes, 0, ahead);
        });
  }
}

template <class T>
void multiply(const LinearCall<T>& whole, const T* packed) {
  with_operands(whole, [&](const LinearCall<T>& call) {
    const PlainWeights<T> weights{packed, call.steps};
    for_each_panel(call, call.steps * kPanel * kStep<T> * sizeof(T), [&](int64_t panel, int64_t row, int64_t end) {
      if constexpr (kWidensOnce && !std::is_same_v<T, Operand<T>>) {
        if (end - row > kDirectRows) return multiply_widened(call, weights.panel(panel), row, end, panel * kPanel);
      }
      multiply_panel(call, weights.panel(panel), row, end, panel * kPanel);
    });
  });
}

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_stream_weights(int64_t is_on) {
  llmstack::streams_weights.store(is_on != 0, std::memory_order_relaxed);
}

#define LLMSTACK_PACK(suffix, T)                                                                \
  extern "C" void llmstack_linear_pack_##suffix(const llmstack::T* weight, llmstack::T* packed, \
                                                int64_t in_features, int64_t out_features) {    \
    llmstack::pack(weight, packed, in_features, out_features);                                  \
  }
#define LLMSTACK_LINEAR(suffix, T, Out)                                                                           \
  extern "C" void llmstack_linear_##suffix(                                                                       \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const llmstack::T* packed, int64_t in_features, \
      int64_t out_features, const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out,           \
      int64_t activation) {                                                                                       \
    llmstack::multiply(                                                                                           \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        packed);                                                                                                  \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(linear_##suffix)

LLMSTACK_PACK(f32, Float32)
LLMSTACK_PACK(bf16, BFloat16)
LLMSTACK_PACK(f16, Float16)
LLMSTACK_LINEAR(f32, Float32, Float32)
LLMSTACK_LINEAR(bf16, BFloat16, BFloat16)
LLMSTACK_LINEAR(f16, Float16, Float16)
LLMSTACK_LINEAR(bf16_f32, BFloat16, Float32)
LLMSTACK_LINEAR(f16_f32, Float16, Float32)
