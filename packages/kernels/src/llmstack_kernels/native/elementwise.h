// Functions of one value that feed-forward layers use.
#pragma once

#include "simd.h"

namespace llmstack {

// Numbered as `ACTIVATION_TO_CODE` in __init__.py.
enum class Activation : int64_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4, kReluSquared = 5 };

// tanh(x) = 1 - 2 / (e^2x + 1).
inline Floats hyperbolic_tangent(Floats x) {
  const Floats bounded = maximum(broadcast(-10.0f), x < broadcast(10.0f) ? x : broadcast(10.0f));
  return 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
}

inline Floats gelu_tanh(Floats x) {
  const Floats inner = 0.7978845608f * multiply_add(x * x * x, broadcast(0.044715f), x);
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

inline Floats gelu(Floats x) {
  Floats y;
  for (int i = 0; i < kLanes; ++i) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067812f));
  return y;
}

inline Floats silu(Floats x) {
  return x / (1.0f + exponential(-x));
}

inline Floats relu(Floats x) {
  return x < 0.0f ? broadcast(0.0f) : x;  // a NaN stays one
}

inline Floats activate(Floats x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return relu(x);
    case Activation::kReluSquared:
      return relu(x) * relu(x);
    case Activation::kGelu:
      return gelu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kSilu:
      return silu(x);
    default:
      return x;
  }
}

// The same of `count` vectors, in place.
inline void activate_all(Floats* x, int count, Activation activation) {
  const auto apply = [&](auto function) {
    for (int i = 0; i < count; ++i) x[i] = function(x[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kGeluTanh:
      return apply(gelu_tanh);
    case Activation::kSilu:
      return apply(silu);
    default:
      return apply([&](Floats value) { return activate(value, activation); });
  }
}

}  // namespace llmstack
