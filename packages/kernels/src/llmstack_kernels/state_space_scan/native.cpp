// The scan of Mamba-2: token by token, each head by itself, and of a head some columns of its state at a time.
//
// The sums over the state's rows have one order, so no cut of a prompt changes a bit.

#include "../native/repeat.h"
#include "../native/state_strip.h"

namespace llmstack {
namespace {

// Of each token and head the factor of its state, and the step. They take libraries' functions, whose errors do not add
// up over thousands of tokens as those of `exponential` could.
template <class T>
void compute_steps(const T* steps, int64_t stride, const float* log_decay, const float* step_bias, float least,
                   float largest, float* factors, int64_t num_tokens, int64_t num_heads) {
  for_each_row(num_tokens, 64 * num_heads, [=](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      float step = softplus(to_float(steps[token * stride + head]) + step_bias[head]);
      step = step < least ? least : step > largest ? largest : step;
      float* pair = factors + (token * num_heads + head) * 2;
      pair[0] = std::exp(-std::exp(log_decay[head]) * step);
      pair[1] = step;
    }
  });
}

template <class T>
void widen(const T* x, float* out, int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) { store_some(out + i, load_some(x + i, n), n); });
}

template <class T>
struct Scan {
  const T* mixed;
  int64_t stride, num_groups, num_heads, state_size, head_dim;

  const T* input(int64_t token, int64_t head) const { return mixed + token * stride + head * head_dim; }
  const T* taken(int64_t token, int64_t head) const {
    return mixed + token * stride + num_heads * head_dim + head / (num_heads / num_groups) * state_size;
  }
  const T* asked(int64_t token, int64_t head) const { return taken(token, head) + num_groups * state_size; }
};

// Some columns of one head, for all tokens [start, end) of a row.
template <class T>
void scan_strip(const Scan<T>& scan, const float* factors, float skip, const float* source, float* target, T* out,
                int64_t head, int64_t first, int64_t start, int64_t end, int64_t known) {
  alignas(64) static thread_local Strip strip;
  alignas(64) float taken[kMaxStateRows], asked[kMaxStateRows];
  const int64_t size = scan.state_size, head_dim = scan.head_dim;
  const int64_t count = head_dim - first < kStrip ? head_dim - first : kStrip;
  strip.load_from(source + first, size, head_dim, count);
  if (known == 0) strip.store_to(target + first, size, head_dim, count);
  for (int64_t token = start; token < end; ++token) {
    const float* pair = factors + (token * scan.num_heads + head) * 2;
    const Floats step = broadcast(pair[1]);
    Floats inputs[kStripVectors], change[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) {
      inputs[v] = Strip::vector(scan.input(token, head) + first, v, count);
      change[v] = inputs[v] * step;
    }
    widen(scan.taken(token, head), taken, size);
    widen(scan.asked(token, head), asked, size);
    strip.template learn<false>(asked, taken, nullptr, broadcast(pair[0]), change, size);
    T* answers = out + (token * scan.num_heads + head) * head_dim + first;
    for (int v = 0; v < kStripVectors && v * kLanes < count; ++v) {
      const int64_t rest = count - v * kLanes;
      const Floats answer = multiply_add(broadcast(skip), inputs[v], strip.out[v]);
      store_some(answers + v * kLanes, answer, rest < kLanes ? static_cast<int>(rest) : kLanes);
    }
    if (token + 1 - start == known) strip.store_to(target + first, size, head_dim, count);
  }
}

}  // namespace
}  // namespace llmstack

// Rows of `mixed` and `steps`, and blocks of `states`, are `*_stride` apart. `factors` is memory for [num_tokens, num_heads, 2].
#define LLMSTACK_STATE_SPACE_SCAN(suffix, T)                                                                         \
  extern "C" void llmstack_state_space_scan_##suffix(                                                                \
      const llmstack::T* mixed, int64_t mixed_stride, const llmstack::T* steps, int64_t steps_stride,                \
      const float* log_decay, const float* step_bias, const float* skip, float* factors, float* states,              \
      int64_t states_stride, const int32_t* starts, const int64_t* sources, const int64_t* targets,                  \
      const int64_t* known, llmstack::T* out, int64_t num_rows, int64_t num_tokens, int64_t num_groups,              \
      int64_t num_heads, int64_t state_size, int64_t head_dim, float least, float largest) {                         \
    using namespace llmstack;                                                                                        \
    compute_steps(steps, steps_stride, log_decay, step_bias, least, largest, factors, num_tokens, num_heads);        \
    const Scan<T> scan{mixed, mixed_stride, num_groups, num_heads, state_size, head_dim};                            \
    const int64_t strips = (head_dim + kStrip - 1) / kStrip, size = state_size * head_dim;                           \
    for_each_chunk(num_rows * num_heads * strips, [=](int64_t item) {                                                \
      const int64_t strip = item % strips, head = item / strips % num_heads, row = item / strips / num_heads;        \
      scan_strip(scan, factors, skip[head], states + sources[row] * states_stride + head * size,                     \
                 states + targets[row] * states_stride + head * size, out, head, strip * kStrip, starts[row],        \
                 starts[row + 1], known[row]);                                                                       \
    });                                                                                                              \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(state_space_scan_##suffix)

LLMSTACK_STATE_SPACE_SCAN(f32, Float32)
LLMSTACK_STATE_SPACE_SCAN(bf16, BFloat16)
LLMSTACK_STATE_SPACE_SCAN(f16, Float16)
