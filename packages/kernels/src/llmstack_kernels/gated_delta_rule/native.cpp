// The gated delta rule: token by token, each head by itself, and of a head some columns of its matrix at a time.
//
// The sums over the matrix's rows have one order, so no cut of a prompt changes a bit.

#include "../native/repeat.h"
#include "../native/state_strip.h"

namespace llmstack {
namespace {

// Of each token and head the factor of its matrix, and the share of what was predicted wrongly that is learnt. They take
// libraries' functions, whose errors do not add up over thousands of tokens as those of `exponential` could.
template <class T>
void compute_factors(const T* decays, int64_t decays_stride, const T* rates, int64_t rates_stride, const float* log_decay,
                     const float* decay_bias, float* factors, int64_t num_tokens, int64_t num_heads) {
  for_each_row(num_tokens, 64 * num_heads, [=](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const float step = softplus(to_float(decays[token * decays_stride + head]) + decay_bias[head]);
      float* pair = factors + (token * num_heads + head) * 2;
      pair[0] = std::exp(-std::exp(log_decay[head]) * step);
      pair[1] = 1.0f / (1.0f + std::exp(-to_float(rates[token * rates_stride + head])));
    }
  });
}

template <class T>
void normalise(const T* x, float* out, int64_t size, float factor) {
  Floats squares = {};
  for_each_vector(size, [&](int64_t i, int n) {
    const Floats values = load_some(x + i, n);
    squares = multiply_add(values, values, squares);
  });
  const Floats scale = broadcast(factor / std::sqrt(sum(squares) + 1e-6f));
  for_each_vector(size, [&](int64_t i, int n) { store_some(out + i, load_some(x + i, n) * scale, n); });
}

template <class T>
struct Heads {
  const T* mixed;
  int64_t stride, num_key_heads, num_heads, key_dim, value_dim;
  bool is_tiled;

  const T* query(int64_t token, int64_t head) const {
    const int64_t own = is_tiled ? head % num_key_heads : head / (num_heads / num_key_heads);
    return mixed + token * stride + own * key_dim;
  }
  const T* key(int64_t token, int64_t head) const { return query(token, head) + num_key_heads * key_dim; }
  const T* value(int64_t token, int64_t head) const {
    return mixed + token * stride + 2 * num_key_heads * key_dim + head * value_dim;
  }
};

// Some columns of one head, for all tokens [start, end) of a row.
template <class T>
void run_strip(const Heads<T>& heads, const float* factors, const float* source, float* target, T* out, int64_t head,
               int64_t first, int64_t start, int64_t end, int64_t known) {
  alignas(64) static thread_local Strip strip;
  alignas(64) float query[kMaxStateRows], keys[2][kMaxStateRows];
  const int64_t key_dim = heads.key_dim, value_dim = heads.value_dim;
  const int64_t count = value_dim - first < kStrip ? value_dim - first : kStrip;
  const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  strip.load_from(source + first, key_dim, value_dim, count);
  if (known == 0) strip.store_to(target + first, key_dim, value_dim, count);
  if (start == end) return;
  normalise(heads.key(start, head), keys[0], key_dim, 1.0f);
  strip.predict(keys[0], key_dim);
  for (int64_t token = start; token < end; ++token) {
    const float* pair = factors + (token * heads.num_heads + head) * 2;
    const Floats decay = broadcast(pair[0]), rate = broadcast(pair[1]);
    Floats change[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) {
      const Floats value = Strip::vector(heads.value(token, head) + first, v, count);
      change[v] = (value - decay * strip.predicted[v]) * rate;
    }
    const float* key = keys[(token - start) % 2];
    float* next_key = keys[(token - start + 1) % 2];
    normalise(heads.query(token, head), query, key_dim, scale);
    if (token + 1 < end) {
      normalise(heads.key(token + 1, head), next_key, key_dim, 1.0f);
      strip.template learn<true>(query, key, next_key, decay, change, key_dim);
    } else {
      strip.template learn<false>(query, key, nullptr, decay, change, key_dim);
    }
    T* answers = out + (token * heads.num_heads + head) * value_dim + first;
    for (int v = 0; v < kStripVectors && v * kLanes < count; ++v) {
      const int64_t rest = count - v * kLanes;
      store_some(answers + v * kLanes, strip.out[v], rest < kLanes ? static_cast<int>(rest) : kLanes);
    }
    if (token + 1 - start == known) strip.store_to(target + first, key_dim, value_dim, count);
  }
}

}  // namespace
}  // namespace llmstack

// Rows of `mixed`, `decays` and `rates`, and blocks of `matrices`, are `*_stride` apart. `factors` is memory for [num_tokens, num_heads, 2].
#define LLMSTACK_GATED_DELTA_RULE(suffix, T)                                                                         \
  extern "C" void llmstack_gated_delta_rule_##suffix(                                                                \
      const llmstack::T* mixed, int64_t mixed_stride, const llmstack::T* decays, int64_t decays_stride,              \
      const llmstack::T* rates, int64_t rates_stride, const float* log_decay, const float* decay_bias,               \
      float* factors, float* matrices, int64_t matrices_stride, const int32_t* starts, const int64_t* sources,       \
      const int64_t* targets, const int64_t* known, llmstack::T* out, int64_t num_rows, int64_t num_tokens,          \
      int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim, int64_t is_tiled) {                                \
    using namespace llmstack;                                                                                        \
    compute_factors(decays, decays_stride, rates, rates_stride, log_decay, decay_bias, factors, num_tokens,          \
                    num_heads);                                                                                      \
    const Heads<T> heads{mixed, mixed_stride, num_key_heads, num_heads, key_dim, value_dim, is_tiled != 0};                         \
    const int64_t strips = (value_dim + kStrip - 1) / kStrip, size = key_dim * value_dim;                            \
    for_each_chunk(num_rows * num_heads * strips, [=](int64_t item) {                                                \
      const int64_t strip = item % strips, head = item / strips % num_heads, row = item / strips / num_heads;        \
      run_strip(heads, factors, matrices + sources[row] * matrices_stride + head * size,                             \
                matrices + targets[row] * matrices_stride + head * size, out, head, strip * kStrip, starts[row],     \
                starts[row + 1], known[row]);                                                                        \
    });                                                                                                              \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(gated_delta_rule_##suffix)

LLMSTACK_GATED_DELTA_RULE(f32, Float32)
LLMSTACK_GATED_DELTA_RULE(bf16, BFloat16)
LLMSTACK_GATED_DELTA_RULE(f16, Float16)
