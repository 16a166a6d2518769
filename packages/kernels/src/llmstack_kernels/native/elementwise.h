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

// erf(x) within 2 units of the last place; odd, at most 1, and a NaN stays one. Up to 0.9 it is x + x p(x^2), beyond it
// 1 - 2^q(|x|), which rounds to 1 from 3.92 on. (p errs by 1.2e-8 of erf(x) and q by 1.7e-9 of it: least largest errors.)
inline Floats error_function(Floats x) {
  const Floats square = x * x;
  Floats p = broadcast(-0x1.3f4f98p-11f);
  p = multiply_add(p, square, broadcast(0x1.4876d4p-8f));
  p = multiply_add(p, square, broadcast(-0x1.b6bee4p-6f));
  p = multiply_add(p, square, broadcast(0x1.ce1dd2p-4f));
  p = multiply_add(p, square, broadcast(-0x1.8126fap-2f));
  p = multiply_add(p, square, broadcast(0x1.06eba6p-3f));
  const Floats near = multiply_add(p, x, x);
  const Ints sign = bits_as<Ints>(x) & INT32_MIN;
  const Floats magnitude = bits_as<Floats>(bits_as<Ints>(x) ^ sign);
  const Floats bounded = magnitude > 4.0f ? broadcast(4.0f) : magnitude;
  Floats q = broadcast(0x1.2bdcap-12f);
  q = multiply_add(q, bounded, broadcast(-0x1.21d66p-8f));
  q = multiply_add(q, bounded, broadcast(0x1.07bbdp-5f));
  q = multiply_add(q, bounded, broadcast(-0x1.339e4ep-3f));
  q = multiply_add(q, bounded, broadcast(-0x1.d68238p-1f));
  q = multiply_add(q, bounded, broadcast(-0x1.a0877ep+0f));
  q = multiply_add(q, bounded, broadcast(-0x1.f798ap-13f));
  const Floats far = bits_as<Floats>(bits_as<Ints>(1.0f - power_of_2_below_1(q)) | sign);
  return magnitude > 0.9f ? far : near;
}

inline Floats gelu(Floats x) {
  return 0.5f * x * (1.0f + error_function(x * 0.7071067812f));
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
    case Activation::kGelu:
      return apply(gelu);
    case Activation::kGeluTanh:
      return apply(gelu_tanh);
    case Activation::kSilu:
      return apply(silu);
    default:
      return apply([&](Floats value) { return activate(value, activation); });
  }
}

}  // namespace llmstack
