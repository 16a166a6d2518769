// Linear layers over the weights of quantized checkpoints: weight = (number - zero point) * scale, or table[number] * scale.
//
// Numbers are widened in registers as in native_quantized.cpp. What a checkpoint stores is not rounded again: scales keep
// their type, zero points are subtracted from the numbers, which is exact, and so are floats of 8 bits.

#include <vector>

#include "../native/repeat.h"
#include "native_widening.h"

namespace llmstack {
namespace {

// bfloat16 that is computed on as float32, for weights that bfloat16 cannot hold.
struct WideBFloat16 : BFloat16 {};
inline Floats load(const WideBFloat16* p) {
  return llmstack::load(static_cast<const BFloat16*>(p));
}
inline void store(WideBFloat16* p, Floats x) {
  llmstack::store(static_cast<BFloat16*>(p), x);
}

// What scales are stored in.
enum class ScaleType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct StoredScales {
  static constexpr bool kHasScales = true;
  const uint8_t* scales;  // [num_groups, 64] of a panel
  ScaleType type;
  int64_t num_groups, group_steps;

  Floats scale(int64_t group, int vector) const {
    const int64_t at = group * kPanel + vector * kLanes;
    switch (type) {
      case ScaleType::kBFloat16:
        return llmstack::load(reinterpret_cast<const BFloat16*>(scales) + at);
      case ScaleType::kFloat16:
        return llmstack::load(reinterpret_cast<const Float16*>(scales) + at);
      default:
        return llmstack::load(reinterpret_cast<const float*>(scales) + at);
    }
  }
};

constexpr int64_t scale_bytes(ScaleType type) {
  return type == ScaleType::kFloat32 ? 4 : 2;
}

#if defined(__AVX512BF16__)
constexpr bool kTakesPairs = true;  // of bfloat16, in the halves of a lane
#else
constexpr bool kTakesPairs = false;
#endif

// One byte for a number: kLanes columns' numbers for one input after another, or where they are taken in pairs, those of
// two inputs side by side.
struct Bytes {
  template <class T>
  static constexpr int64_t kColumnBytes = kLanes * kStep<T>;

  template <class T>
  static void put(uint8_t* packed, int k, int lane, uint8_t number) {
    packed[kTakesPairs && kStep<T> == 2 ? 2 * lane + k : k * kLanes + lane] = number;
  }
};

// Four bits for a number. Two inputs of a column share a byte, or where inputs go singly, two columns of an input.
struct Nibbles {
  template <class T>
  static constexpr int64_t kColumnBytes = kLanes * kStep<T> / 2;

  template <class T>
  static void put(uint8_t* packed, int k, int lane, uint8_t number) {
    if constexpr (kStep<T> == 2) {
      packed[lane] |= k ? number << 4 : number;
    } else {
      packed[lane % (kLanes / 2)] |= lane < kLanes / 2 ? number : number << 4;
    }
  }
  // The numbers of one input, in the lowest bits.
  static Words single(const uint8_t* packed) {
    uint8_t bytes[kLanes];
    std::memcpy(bytes, packed, kLanes / 2);
    std::memcpy(bytes + kLanes / 2, packed, kLanes / 2);
    Words shifts = {};
    for (int i = kLanes / 2; i < kLanes; ++i) shifts[i] = 4;
    return (widen(bytes) >> shifts) & 15;
  }
};

// The zero points of a group's columns: none, integers, or floats where a format has a smallest value in their place.
struct NoZeroPoints {
  static constexpr int64_t kBytes = 0;

  NoZeroPoints(const void*, int64_t, int) {}
};

struct ZeroPoints {
  static constexpr int64_t kBytes = 1;
  Floats zeros[kTileVectors];

  ZeroPoints(const void* extra, int64_t group, int first_vector) {
    const uint8_t* own = static_cast<const uint8_t*>(extra) + group * kPanel + first_vector * kLanes;
    for (int v = 0; v < kTileVectors; ++v) zeros[v] = to_floats((Ints)widen(own + v * kLanes));
  }
};

struct FloatZeroPoints {
  static constexpr int64_t kBytes = 4;
  Floats zeros[kTileVectors];

  FloatZeroPoints(const void* extra, int64_t group, int first_vector) {
    const float* own = static_cast<const float*>(extra) + group * kPanel + first_vector * kLanes;
    for (int v = 0; v < kTileVectors; ++v) zeros[v] = llmstack::load(own + v * kLanes);
  }
};

// Without zero points, numbers have a sign.
template <class Zeros>
struct Int8 : Bytes {
  static constexpr int64_t kZeroBytes = Zeros::kBytes;
  static constexpr bool kIsSigned = kZeroBytes == 0;
  template <class T>
  struct Values : Zeros {
    using Zeros::Zeros;

    Floats number(const uint8_t* packed, int v) const {
      if constexpr (kIsSigned) {
        return to_floats(widen(reinterpret_cast<const int8_t*>(packed)));
      } else {
        return to_floats((Ints)widen(packed)) - this->zeros[v];
      }
    }
    Column<T> column(const uint8_t* packed, int v) const {
      if constexpr (kStep<T> == 1) {
        return {number(packed, v)};
      } else {
#if defined(__AVX512BF16__)
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
        const Words pairs = (Words)(kIsSigned ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
        Floats even = to_floats((Ints)(pairs << 16) >> 16), odd = to_floats((Ints)pairs >> 16);
        if constexpr (!kIsSigned) even = even - this->zeros[v], odd = odd - this->zeros[v];
        return pair_of(even, odd);
#else
        return pair_of(number(packed, v), number(packed + kLanes, v));
#endif
      }
    }
  };
};

template <class Zeros>
struct Int4 : Nibbles {
  static constexpr int64_t kZeroBytes = Zeros::kBytes;
  template <class T>
  struct Values : Zeros {
    using Zeros::Zeros;
    Column<T> column(const uint8_t* packed, int v) const {
      if constexpr (kStep<T> == 2) {
        const Words words = widen(packed);
        return pair_of(to_floats((Ints)(words & 15)) - this->zeros[v], to_floats((Ints)(words >> 4)) - this->zeros[v]);
      } else {
        return {to_floats((Ints)single(packed)) - this->zeros[v]};
      }
    }
  };
};

#if defined(__AVX512BF16__)
// A number and 16 less its zero point name an entry of the bfloat16 numbers from -16 to 15.
template <>
template <>
struct Int4<ZeroPoints>::Values<BFloat16> {
  __m512i offsets[kTileVectors], entries;

  Values(const void* extra, int64_t group, int first_vector) {
    const uint8_t* own = static_cast<const uint8_t*>(extra) + group * kPanel + first_vector * kLanes;
    for (int v = 0; v < kTileVectors; ++v) {
      const Words offset = 16 - widen(own + v * kLanes);
      offsets[v] = (__m512i)(offset | offset << 16);
    }
    uint16_t bits[32];
    for (int i = 0; i < 32; ++i) bits[i] = to_bfloat16(static_cast<float>(i - 16)).bits;
    entries = _mm512_loadu_si512(bits);
  }
  Column<BFloat16> column(const uint8_t* packed, int v) const {
    const Words bytes = widen(packed);
    const __m512i numbers = (__m512i)((bytes | bytes << 12) & 0x000f000fu);
    return {_mm512_permutexvar_epi16(_mm512_add_epi16(numbers, offsets[v]), entries)};
  }
};
#endif

// Scales are 256 times as large, which makes up for the division.
struct Float8 : Bytes {
  static constexpr int64_t kZeroBytes = 0;
  template <class T>
  struct Values {
    Values(const void*, int64_t, int) {}
    Column<T> column(const uint8_t* packed, int) const {
      if constexpr (kStep<T> == 2) {
        return pair_of(widen_float8(packed), widen_float8(packed + kLanes));
      } else {
        return {widen_float8(packed)};
      }
    }
  };
};

#if defined(__AVX512BF16__)
// Exponents are raised by the difference of the biases, less 8; subnormal numbers are looked up.
template <>
struct Float8::Values<BFloat16> {
  __m512i subnormals;

  Values(const void*, int64_t, int) {
    uint16_t bits[32] = {};
    for (int i = 0; i < 8; ++i) bits[i] = to_bfloat16(static_cast<float>(i) * 0x1p-17f).bits;
    subnormals = _mm512_loadu_si512(bits);
  }
  Column<BFloat16> column(const uint8_t* packed, int) const {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi16(0x07f0));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16((127 - 7 - 8) << 7));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_subnormal, bytes, subnormals);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(bytes, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
    return {_mm512_or_si512(value, sign)};
  }
};
#endif

struct Table4 : Nibbles {
  static constexpr int64_t kZeroBytes = 0;
  template <class T>
  struct Values {
    Table table;
    Values(const void* extra, int64_t, int) : table{static_cast<const float*>(extra)} {}
    Column<T> column(const uint8_t* packed, int) const {
      static_assert(kStep<T> == 1, "entries may need the digits of a float");
      return {table.look_up(single(packed))};
    }
  };
};

template <class T, class Format>
int64_t panel_bytes(int64_t steps) {
  return steps * kVectors * Format::template kColumnBytes<T>;
}

template <class T, class Format>
void pack_stored(const uint8_t* numbers, uint8_t* packed, int64_t in_features, int64_t out_features) {
  const int64_t bytes = panel_bytes<T, Format>(num_steps<T>(in_features));
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    uint8_t* out = packed + panel * bytes;
    std::memset(out, 0, bytes);
    const uint8_t* rows = numbers + panel * kPanel * in_features;
    for_each_weight(columns_of(panel, out_features), in_features, [&](int64_t column, int64_t k) {
      uint8_t* at = out + (k / kStep<T> * kVectors + column / kLanes) * Format::template kColumnBytes<T>;
      Format::template put<T>(at, k % kStep<T>, column % kLanes, rows[column * in_features + k]);
    });
  });
}

template <class T, class Format>
struct GroupOfPanel {
  const uint8_t* packed;
  int first_vector;
  typename Format::template Values<T> values;

  Column<T> column(int64_t step, int vector) const {
    return values.column(packed + (step * kVectors + vector) * Format::template kColumnBytes<T>, vector - first_vector);
  }
};

template <class T, class Format>
struct StoredPanel : StoredScales {
  using Weight = T;
  static constexpr int kStepBytes = kVectors * Format::template kColumnBytes<T>;
  static constexpr bool kTakesWideTiles = false;  // zero points are loaded for a narrow tile
  const uint8_t* packed;
  Place<kStepBytes> place;
  const void* extra;  // the panel's zero points [num_groups, 64], or the table

  GroupOfPanel<T, Format> in_group(int64_t group, int first_vector) const {
    return {packed, first_vector, {extra, group, first_vector}};
  }
};

template <class T, class Format>
auto widened(const StoredPanel<T, Format>& panel, int64_t steps) {
  // Plain memory: the allocator of a vector knows the alignment of its elements.
  static thread_local std::vector<Column<T>> columns;
  columns.resize(steps * kVectors);
  for (int64_t group = 0; group < panel.num_groups; ++group) {
    const int64_t begin = group * panel.group_steps, end = begin + panel.group_steps;
    for (int first = 0; first < kVectors; first += kTileVectors) {
      const GroupOfPanel<T, Format> own = panel.in_group(group, first);
      for (int64_t step = begin; step < end && step < steps; ++step) {
        for (int v = first; v < first + kTileVectors; ++v) columns[step * kVectors + v] = own.column(step, v);
      }
    }
  }
  return WidenedPanel<T, StoredScales, decltype(panel.place)>{panel, columns.data(), panel.place};
}

struct StoredWeight {
  const uint8_t* packed;
  const uint8_t* scales;  // [panels, num_groups, 64]
  ScaleType scale_type;
  const uint8_t* extra;  // zero points [panels, num_groups, 64], or a table of 16 floats
  int64_t group_size;
};

template <class Format, class T>
void multiply_stored(const LinearCall<T>& whole, const StoredWeight& weight) {
  using Panel = StoredPanel<T, Format>;
  with_operands(whole, [&](const LinearCall<T>& call) {
    const int64_t group_steps = weight.group_size / kStep<T>, num_groups = (call.steps + group_steps - 1) / group_steps;
    for_each_panel(call, [&](int64_t index, int64_t row, int64_t end) {
      const int64_t first = index * num_groups * kPanel;
      const StoredScales scales{weight.scales + first * scale_bytes(weight.scale_type), weight.scale_type, num_groups,
                                group_steps};
      const auto place = Place<Panel::kStepBytes>::of(weight.packed, index, call.steps);
      const Panel panel{scales, place.start, place, weight.extra + first * Format::kZeroBytes};
      if (end - row > kDirectRows) {
        multiply_panel(call, widened(panel, call.steps), row, end, index * kPanel);
      } else {
        multiply_panel(call, panel, row, end, index * kPanel);
      }
    });
  });
}

template <class T>
void gather_columns(const T* x, int64_t num_rows, int64_t row_stride, const int32_t* order, int64_t size, T* out) {
  for_each_row(num_rows, size, [&](int64_t row) {
    for (int64_t i = 0; i < size; ++i) out[row * size + i] = x[row * row_stride + order[i]];
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_STORED_PACK(format, suffix, T, Format)                                                    \
  extern "C" void llmstack_linear_pack_stored_##format##_##suffix(const uint8_t* numbers, uint8_t* packed, \
                                                                  int64_t in_features, int64_t out_features) { \
    llmstack::pack_stored<llmstack::T, llmstack::Format>(numbers, packed, in_features, out_features);      \
  }
#define LLMSTACK_STORED_LINEAR(format, suffix, T, Out, Format)                                                    \
  extern "C" void llmstack_linear_stored_##format##_##suffix(                                                     \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const uint8_t* packed, const uint8_t* scales,   \
      int64_t scale_type, const uint8_t* extra, int64_t group_size, int64_t in_features, int64_t out_features,    \
      const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out, int64_t activation) {           \
    llmstack::multiply_stored<llmstack::Format>(                                                                  \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        llmstack::StoredWeight{packed, scales, static_cast<llmstack::ScaleType>(scale_type), extra, group_size}); \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(linear_stored_##format##_##suffix)
#define LLMSTACK_STORED_FORMAT(format, Format, BFloat)                     \
  LLMSTACK_STORED_PACK(format, f32, Float32, Format)                       \
  LLMSTACK_STORED_PACK(format, bf16, BFloat, Format)                       \
  LLMSTACK_STORED_PACK(format, f16, Float16, Format)                       \
  LLMSTACK_STORED_LINEAR(format, f32, Float32, Float32, Format)            \
  LLMSTACK_STORED_LINEAR(format, bf16, BFloat, BFloat, Format)             \
  LLMSTACK_STORED_LINEAR(format, bf16_f32, BFloat, Float32, Format)        \
  LLMSTACK_STORED_LINEAR(format, f16, Float16, Float16, Format)            \
  LLMSTACK_STORED_LINEAR(format, f16_f32, Float16, Float32, Format)
#define LLMSTACK_GATHER_COLUMNS(suffix, T)                                                                        \
  extern "C" void llmstack_gather_columns_##suffix(const llmstack::T* x, int64_t num_rows, int64_t row_stride,    \
                                                   const int32_t* order, int64_t size, llmstack::T* out) {        \
    llmstack::gather_columns(x, num_rows, row_stride, order, size, out);                                          \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(gather_columns_##suffix)

LLMSTACK_STORED_FORMAT(int8, Int8<llmstack::ZeroPoints>, BFloat16)
LLMSTACK_STORED_FORMAT(signed8, Int8<llmstack::NoZeroPoints>, BFloat16)
LLMSTACK_STORED_FORMAT(shifted8, Int8<llmstack::FloatZeroPoints>, WideBFloat16)
LLMSTACK_STORED_FORMAT(int4, Int4<llmstack::ZeroPoints>, BFloat16)
LLMSTACK_STORED_FORMAT(shifted4, Int4<llmstack::FloatZeroPoints>, WideBFloat16)
LLMSTACK_STORED_FORMAT(fp8, Float8, BFloat16)
LLMSTACK_STORED_FORMAT(table4, Table4, WideBFloat16)
LLMSTACK_GATHER_COLUMNS(f32, Float32)
LLMSTACK_GATHER_COLUMNS(bf16, BFloat16)
LLMSTACK_GATHER_COLUMNS(f16, Float16)
