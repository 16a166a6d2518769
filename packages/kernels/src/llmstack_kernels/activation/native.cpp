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

extern "C" void llmstack_soft_cap(float* x, int64_t num_rows, int64_t size, float cap) {
  llmstack::soft_cap(x, num_rows, size, cap);
}
LLMSTACK_REPEATABLE(soft_cap)
