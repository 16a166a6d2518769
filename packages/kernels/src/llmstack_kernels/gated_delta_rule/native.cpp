// The gated delta rule: token by token, each head by itself, and of a head some columns of its matrix at a time.
//
// The sums over the matrix's rows have one order, so no cut of a prompt changes a bit.

#include "../native/repeat.h"
#include "../native/state_strip.h"

namespace llmstack {
namespace {

struct Gates {
  const float *log_decay, *decay_bias;
  int64_t num_decays;  // of a head: 1, or one for each row of its matrix
  bool is_bounded;
  float rate_scale, lowest;
};

// Of each token and head the factors of its matrix, and the share of what was predicted wrongly that is learnt. They take
// libraries' functions, whose errors do not add up over thousands of tokens as those of `exponential` could.
template <class T>
void compute_factors(const T* decays, int64_t decays_stride, const T* rates, int64_t rates_stride, const Gates& gates,
                     float* factors, int64_t num_tokens, int64_t num_heads) {
  const int64_t count = gates.num_decays;
  for_each_row(num_tokens, 32 * num_heads * (count + 1), [=](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const float speed = std::exp(gates.log_decay[head]);
      float* own = factors + (token * num_heads + head) * (count + 1);
      for (int64_t i = head * count; i < (head + 1) * count; ++i) {
        const float shifted = to_float(decays[token * decays_stride + i]) + gates.decay_bias[i];
        *own++ = std::exp(gates.is_bounded ? gates.lowest / (1.0f + std::exp(-speed * shifted)) : -speed * softplus(shifted));
      }
      *own = gates.rate_scale / (1.0f + std::exp(-to_float(rates[token * rates_stride + head])));
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

inline void multiply(const float* x, const float* y, float* out, int64_t size) {
  for_each_vector(size, [&](int64_t i, int n) { store_some(out + i, load_some(x + i, n) * load_some(y + i, n), n); });
}

// Some columns of one head, for all tokens [start, end) of a row. Where rows of the matrix have decays of their own, a
// key predicts by the matrix as that times these decays.
template <bool kHasRowDecays, class T>
void run_strip(const Heads<T>& heads, const float* factors, const float* source, float* target, T* out, int64_t head,
               int64_t first, int64_t start, int64_t end, int64_t known) {
  alignas(64) static thread_local Strip strip;
  alignas(64) float query[kMaxStateRows], keys[2][kMaxStateRows], decayed[kMaxStateRows];
  const int64_t key_dim = heads.key_dim, value_dim = heads.value_dim;
  const int64_t count = value_dim - first < kStrip ? value_dim - first : kStrip;
  const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  strip.load_from(source + first, key_dim, value_dim, count);
  if (known == 0) strip.store_to(target + first, key_dim, value_dim, count);
  if (start == end) return;
  const int64_t num_decays = kHasRowDecays ? key_dim : 1;
  const auto factors_of = [&](int64_t token) { return factors + (token * heads.num_heads + head) * (num_decays + 1); };
  const auto prepare_key = [&](int64_t token) {  // returns what predicts the token
    float* key = keys[(token - start) % 2];
    normalise(heads.key(token, head), key, key_dim, 1.0f);
    if constexpr (kHasRowDecays) multiply(key, factors_of(token), decayed, key_dim);
    return kHasRowDecays ? decayed : key;
  };
  strip.predict(prepare_key(start), key_dim);
  for (int64_t token = start; token < end; ++token) {
    const float* own = factors_of(token);
    const Floats decay = broadcast(kHasRowDecays ? 1.0f : own[0]), rate = broadcast(own[num_decays]);
    Floats change[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) {
      const Floats value = Strip::vector(heads.value(token, head) + first, v, count);
      change[v] = (value - decay * strip.predicted[v]) * rate;
    }
    const float* key = keys[(token - start) % 2];
    normalise(heads.query(token, head), query, key_dim, scale);
    const auto learn = [&](auto decays) {
      if (token + 1 < end) {
        strip.template learn<true>(query, key, prepare_key(token + 1), decays, change, key_dim);
      } else {
        strip.template learn<false>(query, key, nullptr, decays, change, key_dim);
      }
    };
    if constexpr (kHasRowDecays) {
      learn(own);
    } else {
      learn(decay);
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

// Rows of `mixed`, `decays` and `rates`, and blocks of `matrices`, are `*_stride` apart. `factors` is memory for [num_tokens, num_heads, num_decays + 1].
#define LLMSTACK_GATED_DELTA_RULE(suffix, T)                                                                         \
  extern "C" void llmstack_gated_delta_rule_##suffix(                                                                \
      const llmstack::T* mixed, int64_t mixed_stride, const llmstack::T* decays, int64_t decays_stride,              \
      const llmstack::T* rates, int64_t rates_stride, const float* log_decay, const float* decay_bias,               \
      float* factors, float* matrices, int64_t matrices_stride, const int32_t* starts, const int64_t* sources,       \
      const int64_t* targets, const int64_t* known, llmstack::T* out, int64_t num_rows, int64_t num_tokens,          \
      int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim, int64_t is_tiled,                \
      int64_t num_decays, int64_t is_bounded, float rate_scale, float lowest) {                                      \
    using namespace llmstack;                                                                                        \
    const Gates gates{log_decay, decay_bias, num_decays, is_bounded != 0, rate_scale, lowest};                       \
    compute_factors(decays, decays_stride, rates, rates_stride, gates, factors, num_tokens, num_heads);              \
    const Heads<T> heads{mixed, mixed_stride, num_key_heads, num_heads, key_dim, value_dim, is_tiled != 0};          \
    const auto run = num_decays == 1 ? run_strip<false, T> : run_strip<true, T>;                                     \
    const int64_t strips = (value_dim + kStrip - 1) / kStrip, size = key_dim * value_dim;                            \
    for_each_chunk(num_rows * num_heads * strips, [=](int64_t item) {                                                \
      const int64_t strip = item % strips, head = item / strips % num_heads, row = item / strips / num_heads;        \
      run(heads, factors, matrices + sources[row] * matrices_stride + head * size,                                   \
          matrices + targets[row] * matrices_stride + head * size, out, head, strip * kStrip, starts[row],           \
          starts[row + 1], known[row]);                                                                              \
    });                                                                                                              \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(gated_delta_rule_##suffix)

LLMSTACK_GATED_DELTA_RULE(f32, Float32)
LLMSTACK_GATED_DELTA_RULE(bf16, BFloat16)
LLMSTACK_GATED_DELTA_RULE(f16, Float16)
