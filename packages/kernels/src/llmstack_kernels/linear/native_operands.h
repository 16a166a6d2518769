// What a linear layer multiplies: panels of weights, and inputs and weights as one instruction takes them.
#pragma once

#include "../native/simd.h"

namespace llmstack {

constexpr int kPanel = 64;  // output columns of a panel
constexpr int kVectors = kPanel / kLanes;

// Inputs that one instruction takes.
template <class T>
constexpr int kStep = 1;
template <>
constexpr int kStep<BFloat16> = 2;

template <class T>
constexpr int64_t num_steps(int64_t in_features) {
  return (in_features + kStep<T> - 1) / kStep<T>;
}

inline int64_t num_panels(int64_t out_features) {
  return (out_features + kPanel - 1) / kPanel;
}

// What products are made of: bfloat16 where the processor multiplies it, else floats, to which inputs are widened.
template <class T>
struct OperandOf {
  using Type = float;
};

// Inputs of a step that are multiplied one after the other.
template <class T>
constexpr int kParts = kStep<T>;

// One part of a step's inputs of a row in every lane, that part of the weights of kLanes columns, and their products.
struct Input {
  Floats value;
  Input() = default;
  explicit Input(const float* x) : value(broadcast(*x)) {}
};
inline Floats add_product(Floats sum, Input x, Floats w) {
  return multiply_add(x.value, w, sum);
}

template <class T>
struct Column {
  Floats value;
  Floats part(int) const { return value; }
};
template <class T>
inline Column<T> load_column(const T* packed) {
  return {load(packed)};
}

#if defined(__AVX512BF16__)
template <>
struct OperandOf<BFloat16> {
  using Type = BFloat16;
};
template <>
constexpr int kParts<BFloat16> = 1;

struct InputPair {
  __m512i pair;
  explicit InputPair(const BFloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    pair = _mm512_set1_epi32(bits);
  }
};
inline Floats add_product(Floats sum, InputPair x, __m512i w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.pair, (__m512bh)w);
}
template <>
struct Column<BFloat16> {
  __m512i pairs;
  __m512i part(int) const { return pairs; }
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  return {_mm512_loadu_si512(packed)};
}
inline InputPair input_of(const BFloat16* x) {
  return InputPair(x);
}
#else
template <>
struct Column<BFloat16> {
  Floats even, odd;
  Floats part(int index) const { return index == 0 ? even : odd; }
};
inline Column<BFloat16> load_column(const BFloat16* packed) {
  Words pairs;
  std::memcpy(&pairs, packed, sizeof(pairs));
  return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & 0xffff0000u)};
}
#endif
inline Input input_of(const float* x) {
  return Input(x);
}

template <class T>
using Operand = typename OperandOf<T>::Type;

}  // namespace llmstack
