// Linear layers over integer weights with a scale per group of inputs and column: weight = integer * scale.
//
// Integers are widened in registers, which is exact in every type. Where several tiles of rows pass over a panel it is
// widened once, into a buffer that the second-level cache holds; the sums are the same bit for bit.

#include <vector>

#include "../native/repeat.h"
#include "native_widening.h"

namespace llmstack {
namespace {

// 8 bits: kLanes columns' weights for one input after another.
struct Int8 {
  template <class T>
  static constexpr int64_t kColumnBytes = kLanes * kStep<T>;

  template <class T>
  static Column<T> column(const uint8_t* packed) {
    const int8_t* p = reinterpret_cast<const int8_t*>(packed);
    if constexpr (kStep<T> == 2) {
      return pair_of(to_floats(widen(p)), to_floats(widen(p + kLanes)));
    } else {
      return {to_floats(widen(p))};
    }
  }
  // The weight of input `k` and column `lane` within a step's kLanes columns.
  template <class T>
  static void put(uint8_t* packed, int k, int lane, int8_t weight) {
    packed[k * kLanes + lane] = static_cast<uint8_t>(weight);
  }
};

// 4 bits, stored plus 8. Two inputs of a column share a byte, or where inputs go singly, two columns of an input.
struct Int4 {
  template <class T>
  static constexpr int64_t kColumnBytes = kLanes * kStep<T> / 2;

  template <class T>
  static Column<T> column(const uint8_t* packed) {
    uint8_t bytes[kLanes];
    std::memcpy(bytes, packed, kColumnBytes<T>);
    if constexpr (kStep<T> == 1) std::memcpy(bytes + kLanes / 2, packed, kLanes / 2);
    const Words words = widen(bytes);
    if constexpr (kStep<T> == 2) {
#if defined(__AVX512BF16__)
      // bfloat16 of -8 to 7; a permutation looks at the lowest four bits of each index.
      const __m512i values =
          _mm512_setr_epi32(0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
                            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0);
      const __m512i low = _mm512_permutexvar_epi32((__m512i)words, values);
      const __m512i high = _mm512_permutexvar_epi32((__m512i)(words >> 4), _mm512_slli_epi32(values, 16));
      return {_mm512_or_si512(low, high)};
#else
      return pair_of(centred(words & 15), centred(words >> 4));
#endif
    } else {
      Words shifts = {};
      for (int i = kLanes / 2; i < kLanes; ++i) shifts[i] = 4;
      return {centred((words >> shifts) & 15)};
    }
  }
  template <class T>
  static void put(uint8_t* packed, int k, int lane, int8_t weight) {
    const uint8_t stored = static_cast<uint8_t>(weight + 8);
    if constexpr (kStep<T> == 2) {
      packed[lane] |= k ? stored << 4 : stored;
    } else {
      packed[lane % (kLanes / 2)] |= lane < kLanes / 2 ? stored : stored << 4;
    }
  }

 private:
  static Floats centred(Words stored) {
    return to_floats((Ints)stored - 8);
  }
};

template <class T, class Format>
int64_t panel_bytes(int64_t steps) {
  return steps * kVectors * Format::template kColumnBytes<T>;
}

template <class T, class Format>
void pack(const int8_t* weight, uint8_t* packed, int64_t in_features, int64_t out_features) {
  const int64_t steps = num_steps<T>(in_features), bytes = panel_bytes<T, Format>(steps);
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    uint8_t* out = packed + panel * bytes;
    std::memset(out, 0, bytes);
    const int8_t* rows = weight + panel * kPanel * in_features;
    for_each_weight(columns_of(panel, out_features), in_features, [&](int64_t column, int64_t k) {
      uint8_t* at = out + (k / kStep<T> * kVectors + column / kLanes) * Format::template kColumnBytes<T>;
      Format::template put<T>(at, k % kStep<T>, column % kLanes, rows[column * in_features + k]);
    });
  });
}

// The scales of a panel: [num_groups, 64], a group being `group_steps` steps.
struct Scales {
  static constexpr bool kHasScales = true;
  const BFloat16* scales;
  int64_t num_groups, group_steps;

  Floats scale(int64_t group, int vector) const {
    return load(scales + group * kPanel + vector * kLanes);
  }
};

template <class T, class Format>
struct PackedPanel : Scales {
  using Weight = T;
  static constexpr int kStepBytes = kVectors * Format::template kColumnBytes<T>;
  static constexpr bool kTakesWideTiles = true;
  const uint8_t* packed;
  Place<kStepBytes> place;

  const PackedPanel& in_group(int64_t, int) const {
    return *this;
  }
  Column<T> column(int64_t step, int vector) const {
    return Format::template column<T>(packed + (step * kVectors + vector) * Format::template kColumnBytes<T>);
  }
};

template <class T, class Format>
auto widened(const PackedPanel<T, Format>& panel, int64_t steps) {
  // Plain memory: the allocator of a vector knows the alignment of its elements.
  static thread_local std::vector<Column<T>> columns;
  columns.resize(steps * kVectors);
  for (int64_t step = 0; step < steps; ++step) {
    for (int v = 0; v < kVectors; ++v) columns[step * kVectors + v] = panel.column(step, v);
  }
  return WidenedPanel<T, Scales, decltype(panel.place)>{panel, columns.data(), panel.place};
}

template <class Format, class T>
void multiply(const LinearCall<T>& whole, const uint8_t* packed, const BFloat16* scales, int64_t group_size) {
  using Panel = PackedPanel<T, Format>;
  with_operands(whole, [&](const LinearCall<T>& call) {
    const int64_t group_steps = group_size / kStep<T>, num_groups = (call.steps + group_steps - 1) / group_steps;
    for_each_panel(call, [&](int64_t index, int64_t row, int64_t end) {
      const Scales own{scales + index * num_groups * kPanel, num_groups, group_steps};
      const auto place = Place<Panel::kStepBytes>::of(packed, index, call.steps);
      const Panel panel{own, place.start, place};
      if (end - row > kDirectRows) {
        multiply_panel(call, widened(panel, call.steps), row, end, index * kPanel);
      } else {
        multiply_panel(call, panel, row, end, index * kPanel);
      }
    });
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_QUANTIZED_PACK(format, suffix, T, Format)                                              \
  extern "C" void llmstack_linear_pack_##format##_##suffix(const int8_t* weight, uint8_t* packed,       \
                                                           int64_t in_features, int64_t out_features) { \
    llmstack::pack<llmstack::T, llmstack::Format>(weight, packed, in_features, out_features);           \
  }
#define LLMSTACK_QUANTIZED_LINEAR(format, suffix, T, Out, Format)                                                 \
  extern "C" void llmstack_linear_##format##_##suffix(                                                            \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const uint8_t* packed,                          \
      const llmstack::BFloat16* scales, int64_t group_size, int64_t in_features, int64_t out_features,            \
      const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out, int64_t activation) {           \
    llmstack::multiply<llmstack::Format>(                                                                         \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        packed, scales, group_size);                                                                              \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(linear_##format##_##suffix)
#define LLMSTACK_FORMAT(format, Format)                               \
  LLMSTACK_QUANTIZED_PACK(format, f32, Float32, Format)               \
  LLMSTACK_QUANTIZED_PACK(format, bf16, BFloat16, Format)             \
  LLMSTACK_QUANTIZED_LINEAR(format, f32, Float32, Float32, Format)    \
  LLMSTACK_QUANTIZED_LINEAR(format, bf16, BFloat16, BFloat16, Format) \
  LLMSTACK_QUANTIZED_LINEAR(format, bf16_f32, BFloat16, Float32, Format)

LLMSTACK_FORMAT(int8, Int8)
LLMSTACK_FORMAT(int4, Int4)
