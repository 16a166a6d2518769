// Weights rounded to integers with a scale per group of inputs, as quantization.py does it, in one pass over the memory.

#include <vector>

#include "../native/rows.h"

namespace llmstack {
namespace {

// Integers from `lowest` to `largest`; `factors` take a group's largest weight to the scales to choose from.
struct Scheme {
  int64_t group_size;
  float lowest, largest;
  const float* factors;
  int64_t num_factors;
};

// To nearest, ties to even, for numbers below 2^22.
inline Floats rounded(Floats x) {
  const Floats shifter = broadcast(0x1.8p23f);
  return (x + shifter) - shifter;
}

inline Floats integers_of(Floats weights, float inverse, const Scheme& scheme) {
  const Floats highest = broadcast(scheme.largest);
  const Floats raised = maximum(rounded(weights * inverse), broadcast(scheme.lowest));
  return raised < highest ? raised : highest;
}

inline float inverse_of(float scale) {
  return scale > 0.0f ? 1.0f / scale : 0.0f;
}

inline float square_error(const Floats* weights, int64_t num_vectors, float scale, const Scheme& scheme) {
  const float inverse = inverse_of(scale);
  Floats total{};
  for (int64_t v = 0; v < num_vectors; ++v) {
    const Floats off = integers_of(weights[v], inverse, scheme) * scale - weights[v];
    total = multiply_add(off, off, total);
  }
  return sum(total);
}

// The scale with the least square error, the first of equal ones.
inline BFloat16 choose_scale(const Floats* weights, int64_t num_vectors, const Scheme& scheme) {
  Floats tops{};
  for (int64_t v = 0; v < num_vectors; ++v) tops = maximum(tops, maximum(weights[v], -weights[v]));
  const float top = largest(tops);
  BFloat16 best = to_bfloat16(top * scheme.factors[0]);
  if (scheme.num_factors == 1) return best;
  float least = square_error(weights, num_vectors, to_float(best), scheme);
  for (int64_t i = 1; i < scheme.num_factors; ++i) {
    const BFloat16 scale = to_bfloat16(top * scheme.factors[i]);
    const float error = square_error(weights, num_vectors, to_float(scale), scheme);
    if (error < least) best = scale, least = error;
  }
  return best;
}

// `weights` has room for a group. The lanes behind the last input are 0, which changes neither scale nor error.
template <class T>
void quantize_group(const T* weight, int64_t size, const Scheme& scheme, Floats* weights, int8_t* integers,
                    BFloat16* scale) {
  for_each_vector(size, [&](int64_t i, int n) { weights[i / kLanes] = load_some(weight + i, n); });
  *scale = choose_scale(weights, (size + kLanes - 1) / kLanes, scheme);
  const float inverse = inverse_of(to_float(*scale));
  for_each_vector(size, [&](int64_t i, int n) {
    store_integers(integers + i, integers_of(weights[i / kLanes], inverse, scheme), n);
  });
}

template <class T>
void quantize(const T* weight, int64_t out_features, int64_t in_features, const Scheme& scheme, int8_t* integers,
              BFloat16* scales) {
  const int64_t num_groups = (in_features + scheme.group_size - 1) / scheme.group_size;
  for_each_row(out_features, in_features, [&](int64_t row) {
    // Plain memory: the allocator of a vector knows the alignment of its elements.
    static thread_local std::vector<Floats> weights;
    weights.resize((scheme.group_size + kLanes - 1) / kLanes);
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t start = group * scheme.group_size, rest = in_features - start;
      const int64_t size = rest < scheme.group_size ? rest : scheme.group_size, at = row * in_features + start;
      quantize_group(weight + at, size, scheme, weights.data(), integers + at, scales + row * num_groups + group);
    }
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_QUANTIZE(suffix, T)                                                                             \
  extern "C" void llmstack_quantize_##suffix(const llmstack::T* weight, int64_t out_features,                    \
                                             int64_t in_features, int64_t group_size, int64_t lowest,            \
                                             int64_t largest, const float* factors, int64_t num_factors,         \
                                             int8_t* integers, llmstack::BFloat16* scales) {                     \
    const llmstack::Scheme scheme{group_size, static_cast<float>(lowest), static_cast<float>(largest), factors,  \
                                  num_factors};                                                                  \
    llmstack::quantize(weight, out_features, in_features, scheme, integers, scales);                             \
  }

LLMSTACK_QUANTIZE(f32, Float32)
LLMSTACK_QUANTIZE(bf16, BFloat16)
LLMSTACK_QUANTIZE(f16, Float16)
