// Layer normalisation: two passes over a row that lies in the first-level cache, so that variances do not cancel.

#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, T* out, int64_t num_rows, int64_t size, float eps) {
  for_each_row(num_rows, size, [=](int64_t row) {
    const T* source = x + row * size;
    Floats sums = {}, squares = {};
    for_each_vector(size, [&](int64_t i, int n) { sums = sums + load_some(source + i, n); });
    const Floats mean = broadcast(sum(sums) / static_cast<float>(size));
    for_each_vector(size, [&](int64_t i, int n) {
      Floats centred = load_some(source + i, n) - mean;
      for (int lane = n; lane < kLanes; ++lane) centred[lane] = 0.0f;
      squares = multiply_add(centred, centred, squares);
    });
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, int n) {
      Floats y = (load_some(source + i, n) - mean) * scale * load_some(weight + i, n);
      if (bias != nullptr) y = y + load_some(bias + i, n);
      store_some(out + row * size + i, y, n);
    });
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_LAYER_NORM(suffix, T)                                                                             \
  extern "C" void llmstack_layer_norm_##suffix(const llmstack::T* x, const llmstack::T* weight,                    \
                                               const llmstack::T* bias, llmstack::T* out, int64_t num_rows,        \
                                               int64_t size, float eps) {                                          \
    llmstack::layer_norm(x, weight, bias, out, num_rows, size, eps);                                               \
  }                                                                                                                \
  LLMSTACK_REPEATABLE(layer_norm_##suffix)

LLMSTACK_LAYER_NORM(f32, Float32)
LLMSTACK_LAYER_NORM(bf16, BFloat16)
LLMSTACK_LAYER_NORM(f16, Float16)
