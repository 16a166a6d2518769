// Activation functions, alone and as the gate of the row's other half.

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

template <class T>
void activation(const T* x, T* out, int64_t num_rows, int64_t size, int64_t code, bool is_gated) {
  const Activation kind = static_cast<Activation>(code);
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* source = x + row * (is_gated ? 2 * size : size);
    for_each_vector(size, [&](int64_t i, int n) {
      Floats y = activate(load_some(source + i, n), kind);
      if (is_gated) y = rounded_to<T>(y) * load_some(source + size + i, n);
      store_some(out + row * size + i, y, n);
    });
  });
}

// Gates and ups in turns, of which gates are bounded above and ups on both sides.
template <class T>
void clamped_swiglu(const T* x, T* out, int64_t num_rows, int64_t size, float alpha, float limit) {
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* source = x + row * 2 * size;
    for_each_vector(size, [&](int64_t i, int n) {
      float pairs[2 * kLanes] = {};
      store(pairs, load_some(source + 2 * i, n * 2 < kLanes ? n * 2 : kLanes));
      if (2 * n > kLanes) store(pairs + kLanes, load_some(source + 2 * i + kLanes, 2 * n - kLanes));
      Floats gate, up;
      for (int lane = 0; lane < kLanes; ++lane) gate[lane] = pairs[2 * lane], up[lane] = pairs[2 * lane + 1];
      const Floats most = broadcast(limit);
      gate = gate > most ? most : gate;  // a NaN stays one
      up = up > most ? most : up < -most ? -most : up;
      store_some(out + row * size + i, (up + 1.0f) * (gate / (1.0f + exponential(-(alpha * gate)))), n);
    });
  });
}

// Tokens of the gate are `gate_stride` apart; each has as many numbers as one of x, or one for all. With `is_silu` gates are
// multiplied by their sigmoids.
template <class T>
void sigmoid_gate(const T* x, const T* gate, int64_t gate_stride, T* out, int64_t num_rows, int64_t size, bool is_single,
                  bool is_silu) {
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* gates = gate + row * gate_stride;
    const Floats single = is_single ? broadcast(to_float(*gates)) : Floats{};
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats opened = is_single ? single : load_some(gates + i, n);
      const Floats own = load_some(x + row * size + i, n);
      store_some(out + row * size + i, (is_silu ? own * opened : own) / (1.0f + exponential(-opened)), n);
    });
  });
}

template <class T>
void multiply_columns(const T* x, const float* factors, bool is_single, T* out, int64_t num_rows, int64_t size) {
  for_each_row(num_rows, size, [=](int64_t row) {
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats own = is_single ? broadcast(*factors) : load_some(factors + i, n);
      store_some(out + row * size + i, load_some(x + row * size + i, n) * own, n);
    });
  });
}

void soft_cap(float* x, int64_t num_rows, int64_t size, float cap) {
  for_each_row(num_rows, size, [=](int64_t row) {
    float* values = x + row * size;
    for_each_vector(size, [&](int64_t i, int n) {
      store_some(values + i, cap * hyperbolic_tangent(load_some(values + i, n) / cap), n);
    });
  });
}

}  // namespace
}  // namespace llmstack

// `size` is the length of an output row; with `is_gated`, half that of an input row.
#define LLMSTACK_ACTIVATION(suffix, T)                                                                       \
  extern "C" void llmstack_activation_##suffix(const llmstack::T* x, llmstack::T* out, int64_t num_rows,     \
                                               int64_t size, int64_t activation, int64_t is_gated) {         \
    llmstack::activation(x, out, num_rows, size, activation, is_gated != 0);                                 \
  }                                                                                                          \
  LLMSTACK_REPEATABLE(activation_##suffix)

LLMSTACK_ACTIVATION(f32, Float32)
LLMSTACK_ACTIVATION(bf16, BFloat16)
LLMSTACK_ACTIVATION(f16, Float16)

#define LLMSTACK_CLAMPED_SWIGLU(suffix, T)                                                                  \
  extern "C" void llmstack_clamped_swiglu_##suffix(const llmstack::T* x, llmstack::T* out, int64_t num_rows, \
                                                   int64_t size, float alpha, float limit) {                 \
    llmstack::clamped_swiglu(x, out, num_rows, size, alpha, limit);                                          \
  }                                                                                                          \
  LLMSTACK_REPEATABLE(clamped_swiglu_##suffix)

LLMSTACK_CLAMPED_SWIGLU(f32, Float32)
LLMSTACK_CLAMPED_SWIGLU(bf16, BFloat16)
LLMSTACK_CLAMPED_SWIGLU(f16, Float16)

#define LLMSTACK_SIGMOID_GATE(suffix, T)                                                                          \
  extern "C" void llmstack_sigmoid_gate_##suffix(const llmstack::T* x, const llmstack::T* gate, int64_t gate_stride, \
                                                 llmstack::T* out, int64_t num_rows, int64_t size,                \
                                                 int64_t is_single, int64_t is_silu) {                            \
    llmstack::sigmoid_gate(x, gate, gate_stride, out, num_rows, size, is_single != 0, is_silu != 0);              \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(sigmoid_gate_##suffix)

LLMSTACK_SIGMOID_GATE(f32, Float32)
LLMSTACK_SIGMOID_GATE(bf16, BFloat16)
LLMSTACK_SIGMOID_GATE(f16, Float16)

#define LLMSTACK_MULTIPLY_COLUMNS(suffix, T)                                                                          \
  extern "C" void llmstack_multiply_columns_##suffix(const llmstack::T* x, const float* factors, int64_t is_single,  \
                                                     llmstack::T* out, int64_t num_rows, int64_t size) {             \
    llmstack::multiply_columns(x, factors, is_single != 0, out, num_rows, size);                                     \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(multiply_columns_##suffix)

LLMSTACK_MULTIPLY_COLUMNS(f32, Float32)
LLMSTACK_MULTIPLY_COLUMNS(bf16, BFloat16)
LLMSTACK_MULTIPLY_COLUMNS(f16, Float16)

extern "C" void llmstack_soft_cap(float* x, int64_t num_rows, int64_t size, float cap) {
  llmstack::soft_cap(x, num_rows, size, cap);
}
LLMSTACK_REPEATABLE(soft_cap)
