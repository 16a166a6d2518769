// Root-mean-square normalisation, with and without the residual addition before it.

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

template <class T, class Weight>
void rms_norm(const T* x, int64_t group_rows, int64_t group_stride, const T* residual, const Weight* weight, T* out,
              T* total, int64_t num_rows, int64_t size, float eps) {
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* source = x + row / group_rows * group_stride + row % group_rows * size;
    if (residual != nullptr) {  // the next residual is the rounded sum, and so is what is normalised
      for_each_vector(size, [&](int64_t i, int n) {
        const Floats added = load_some(source + i, n) + load_some(residual + row * size + i, n);
        store_some(total + row * size + i, added, n);
      });
      source = total + row * size;
    }
    Floats squares = {};
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats values = load_some(source + i, n);
      squares = multiply_add(values, values, squares);
    });
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats scaled = rounded_to<Weight>(load_some(source + i, n) * scale);
      store_some(out + row * size + i, scaled * load_some(weight + i, n), n);
    });
  });
}

// Rows of x follow each other; groups of `group_rows` rows of the gate are `gate_stride` apart. There are `weight_rows` rows
// of weights, which those of x have in turns.
template <bool kIsGatedFirst, class T>
void gated_rms_norm(const T* x, const T* gate, int64_t group_rows, int64_t gate_stride, const T* weight,
                    int64_t weight_rows, T* out, int64_t num_rows, int64_t size, float eps) {
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* source = x + row * size;
    const T* gates = gate + row / group_rows * gate_stride + row % group_rows * size;
    const T* factors = weight + row % weight_rows * size;
    const auto values = [&](int64_t i, int n) {
      const Floats own = load_some(source + i, n);
      return kIsGatedFirst ? own * silu(load_some(gates + i, n)) : own;
    };
    Floats squares = {};
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats own = values(i, n);
      squares = multiply_add(own, own, squares);
    });
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, int n) {
      const Floats scaled = rounded_to<T>(values(i, n) * scale) * load_some(factors + i, n);
      store_some(out + row * size + i, kIsGatedFirst ? scaled : rounded_to<T>(scaled) * silu(load_some(gates + i, n)), n);
    });
  });
}

}  // namespace
}  // namespace llmstack

// `group_rows` rows of x follow each other, the groups are `group_stride` apart: so may the heads of each token be slices of
// a wider projection. `residual` and `total` are null where nothing is added.
#define LLMSTACK_RMS_NORM(suffix, T, Weight)                                                                       \
  extern "C" void llmstack_rms_norm_##suffix(                                                                      \
      const llmstack::T* x, int64_t group_rows, int64_t group_stride, const llmstack::T* residual,                 \
      const llmstack::Weight* weight, llmstack::T* out, llmstack::T* total, int64_t num_rows, int64_t size,        \
      float eps) {                                                                                                 \
    llmstack::rms_norm(x, group_rows, group_stride, residual, weight, out, total, num_rows, size, eps);            \
  }                                                                                                                \
  LLMSTACK_REPEATABLE(rms_norm_##suffix)

LLMSTACK_RMS_NORM(f32_f32, Float32, Float32)
LLMSTACK_RMS_NORM(bf16_bf16, BFloat16, BFloat16)
LLMSTACK_RMS_NORM(bf16_f32, BFloat16, Float32)
LLMSTACK_RMS_NORM(f16_f16, Float16, Float16)
LLMSTACK_RMS_NORM(f16_f32, Float16, Float32)

#define LLMSTACK_GATED_RMS_NORM(suffix, T)                                                                             \
  extern "C" void llmstack_gated_rms_norm_##suffix(const llmstack::T* x, const llmstack::T* gate, int64_t group_rows,  \
                                                   int64_t gate_stride, const llmstack::T* weight,                     \
                                                   int64_t weight_rows, llmstack::T* out, int64_t num_rows,            \
                                                   int64_t size, float eps, int64_t is_gated_first) {                  \
    const auto norm = is_gated_first ? llmstack::gated_rms_norm<true, llmstack::T>                                     \
                                     : llmstack::gated_rms_norm<false, llmstack::T>;                                   \
    norm(x, gate, group_rows, gate_stride, weight, weight_rows, out, num_rows, size, eps);                             \
  }                                                                                                                    \
  LLMSTACK_REPEATABLE(gated_rms_norm_##suffix)

LLMSTACK_GATED_RMS_NORM(f32, Float32)
LLMSTACK_GATED_RMS_NORM(bf16, BFloat16)
LLMSTACK_GATED_RMS_NORM(f16, Float16)
