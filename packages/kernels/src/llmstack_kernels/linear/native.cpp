// Linear layers over weights as they are.

#include "../native/repeat.h"
#include "native.h"

namespace llmstack {
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

template <class T>
void multiply(const LinearCall<T>& call, const T* packed) {
  const PlainWeights<T> weights{packed, call.steps};
  for_each_panel(call, [&](int64_t panel, int64_t row, int64_t end) {
    multiply_panel(call, weights.panel(panel), row, end, panel * kPanel);
  });
}

}  // namespace
}  // namespace llmstack

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
