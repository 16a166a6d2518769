// Linear layers whose inputs are rounded to integers of 8 bits, row by row, as their weights are: integer dot products.
//
// output = sum of integer products * (scale of the row * scale of the column). Sums of integers are exact in any order, so
// rows cannot depend on their neighbours, and all variants and the reference give the same bits.

#include <vector>

#include "../native/repeat.h"
#include "native_widening.h"
#if defined(__AVX512BF16__)
#include "native_tile_panels.h"
#endif

namespace llmstack {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kInputs = 4;  // of one instruction, which takes inputs without a sign: 128 is added, and subtracted again
#else
constexpr int kInputs = 2;
#endif

// Rows without a larger input become zeros, since 127 divided by their largest would be infinite.
constexpr float kSmallestInput = 1e-30f;

constexpr int64_t dynamic_steps(int64_t in_features) {
  return (in_features + kInputs - 1) / kInputs;
}

// A step's weights of kLanes columns, and sums of kInputs products in each lane. `inputs` is a step's inputs of one row.
#if defined(__AVX512VNNI__)
using Weights = __m512i;
inline Weights load_weights(const int8_t* p) {
  return _mm512_loadu_si512(p);
}
inline Ints add_products(Ints sums, uint32_t inputs, Weights weights) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(inputs), weights);
}
#elif defined(__AVX512F__)
using Weights = __m512i;
inline Weights load_weights(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints add_products(Ints sums, uint32_t inputs, Weights weights) {
  return sums + (Ints)_mm512_madd_epi16(_mm512_set1_epi32(inputs), weights);
}
#elif defined(__AVX2__)
using Weights = __m256i;
inline Weights load_weights(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints add_products(Ints sums, uint32_t inputs, Weights weights) {
  return sums + (Ints)_mm256_madd_epi16(_mm256_set1_epi32(inputs), weights);
}
#else
struct Weights {
  Ints first, second;
};
inline Weights load_weights(const int8_t* p) {
  Weights weights;
  for (int i = 0; i < kLanes; ++i) weights.first[i] = p[2 * i], weights.second[i] = p[2 * i + 1];
  return weights;
}
inline Ints add_products(Ints sums, uint32_t inputs, Weights weights) {
  const int first = static_cast<int16_t>(inputs & 0xffff), second = static_cast<int16_t>(inputs >> 16);
  return sums + first * weights.first + second * weights.second;
}
#endif

inline void put_input(uint32_t* words, int64_t k, int32_t value) {
#if defined(__AVX512VNNI__)
  words[k / 4] |= static_cast<uint32_t>(value + 128) << (8 * (k % 4));
#else
  words[k / 2] |= static_cast<uint32_t>(static_cast<uint16_t>(value)) << (16 * (k % 2));
#endif
}

// Integers of a row, and the scale that they are to be multiplied by. A row with a NaN gets the scale NaN.
template <class T>
float round_row(const T* x, int64_t size, uint32_t* words) {
  Floats top = {}, nan = {};
  for_each_vector(size, [&](int64_t i, int n) {
    const Floats v = load_some(x + i, n);
    top = maximum(top, maximum(v, -v));
    nan = nan + (v - v);  // 0, or NaN where v is infinite or none
  });
  std::memset(words, 0, dynamic_steps(size) * sizeof(uint32_t));
  const float largest_input = largest(top), check = sum(nan);
  const float inverse = largest_input > kSmallestInput && check == 0.0f ? 127.0f / largest_input : 0.0f;
  const Floats shifter = broadcast(0x1.8p23f);  // rounds to an integer, ties to even
  for_each_vector(size, [&](int64_t i, int n) {
    Floats v = load_some(x + i, n) * inverse;
    if (check != 0.0f) v = Floats{};
    const Floats rounded = (v + shifter) - shifter;
    for (int lane = 0; lane < n; ++lane) put_input(words, i + lane, static_cast<int32_t>(rounded[lane]));
  });
  return largest_input / 127.0f + check;
}

struct DynamicWeight {
  const int8_t* packed;        // [panels, steps, 64, kInputs]
  const int32_t* corrections;  // [panels * 64], what an offset of the inputs adds to each sum
  const float* scales;         // [panels * 64]

  // Sums of the columns from `column` on, and a row with a scale, as floats.
  Floats scaled(Ints sums, float row_scale, int64_t column) const {
    Ints correction;
    std::memcpy(&correction, corrections + column, sizeof(correction));
    return to_floats(sums - correction) * (row_scale * load(scales + column));
  }
};

template <int kRows, int kColumnVectors, class T, class Ahead>
void dynamic_tile(const LinearCall<T>& call, const DynamicWeight& weight, const uint32_t* words, const float* row_scales,
                  int64_t steps, int64_t row, int64_t first_column, int first_vector, Ahead ahead) {
  const int8_t* packed = weight.packed + (first_column * steps + first_vector * kLanes) * kInputs;
  const uint32_t* inputs = words + row * steps;
  Ints sums[kRows][kColumnVectors] = {};
  for (int64_t step = 0; step < steps; ++step, packed += kPanel * kInputs) {
    ahead.prefetch();
    Weights columns[kColumnVectors];
    for (int v = 0; v < kColumnVectors; ++v) columns[v] = load_weights(packed + v * kLanes * kInputs);
    for (int r = 0; r < kRows; ++r) {
      const uint32_t input = inputs[r * steps + step];
      for (int v = 0; v < kColumnVectors; ++v) sums[r][v] = add_products(sums[r][v], input, columns[v]);
    }
  }
  Floats scaled[kRows][kColumnVectors];
  const int64_t column = first_column + first_vector * kLanes;  // weights are padded to whole panels
  for (int v = 0; v < kColumnVectors; ++v) {
    for (int r = 0; r < kRows; ++r) scaled[r][v] = weight.scaled(sums[r][v], row_scales[row + r], column + v * kLanes);
  }
  store_sums(call, row, kRows, column, kColumnVectors, &scaled[0][0]);
}

// Calls `work(words, scales)` with rows whose integers are there: [num_rows, steps] words, and a scale for each row.
template <class T, class Work>
void with_rounded_rows(const LinearCall<T>& call, int64_t in_features, const Work& work) {
  static thread_local std::vector<uint32_t> all_words;
  static thread_local std::vector<float> all_scales;
  const int64_t steps = dynamic_steps(in_features);
  all_words.resize(call.num_rows * steps);
  all_scales.resize(call.num_rows);
  uint32_t* words = all_words.data();  // other threads have vectors of their own
  float* scales = all_scales.data();
  for_each_row(call.num_rows, in_features, [&](int64_t row) {
    scales[row] = round_row(call.x + row * call.row_stride, in_features, words + row * steps);
  });
  work(words, scales);
}

template <class T>
void multiply_dynamic(const LinearCall<T>& call, int64_t in_features, const DynamicWeight& weight) {
  const int64_t steps = dynamic_steps(in_features);
  with_rounded_rows(call, in_features, [&](const uint32_t* words, const float* scales) {
    for_each_panel(call, steps * kPanel * kInputs, [&](int64_t panel, int64_t row, int64_t end) {
      const auto place = Place<kPanel * kInputs>::of(weight.packed, panel, steps);
      for_each_pass<kTileRows, PassWidths<kWideVectors, kTileVectors>, kVectors, true>(
          place, steps, row, end, [&](auto rows, auto vectors, int64_t at, int vector, auto ahead) {
            dynamic_tile<rows, vectors>(call, weight, words, scales, steps, at, panel * kPanel, vector, ahead);
          });
    });
  });
}

#if defined(__AVX512BF16__)
// The same integers by the tiles of AMX. A single row is read faster by vectors (measured: 0.92 times the time).
template <class T>
void multiply_dynamic_by_tiles(const LinearCall<T>& whole, int64_t in_features, const DynamicWeight& weight) {
  if (whole.num_rows == 1) return multiply_dynamic(whole, in_features, weight);
  const int64_t steps = dynamic_steps(in_features);
  for_each_part(whole, rows_of_part(steps * kInputs), [&](const LinearCall<T>& call) {
    with_rounded_rows(call, in_features, [&](const uint32_t* words, const float* row_scales) {
      const TileRows rows{reinterpret_cast<const uint8_t*>(words), steps * kInputs};
      multiply_by_tiles<IntegerTiles>(
          call, rows, steps, weight.packed, [&](int64_t row, int64_t num_rows, int64_t panel, Floats* sums) {
            for (int v = 0; v < kVectors; ++v) {
              const int64_t column = panel * kPanel + v * kLanes;
              for (int64_t r = 0; r < num_rows; ++r) {
                Floats& own = sums[r * kVectors + v];
                own = weight.scaled(bits_as<Ints>(own), row_scales[row + r], column);
              }
            }
            store_sums(call, row, static_cast<int>(num_rows), panel * kPanel, kVectors, sums);
          });
    });
  });
}
#endif

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_linear_pack_dynamic(const int8_t* weight, int8_t* packed, int32_t* corrections,
                                             int64_t in_features, int64_t out_features) {
  using namespace llmstack;
  const int64_t steps = dynamic_steps(in_features);
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    int8_t* out = packed + panel * kPanel * steps * kInputs;
    std::memset(out, 0, kPanel * steps * kInputs);
    const int8_t* rows = weight + panel * kPanel * in_features;
    uint32_t totals[kPanel] = {};
    for_each_weight(columns_of(panel, out_features), in_features, [&](int64_t column, int64_t k) {
      const int8_t value = rows[column * in_features + k];
      out[(k / kInputs * kPanel + column) * kInputs + k % kInputs] = value;
      totals[column] += static_cast<uint32_t>(value);
    });
    for (int64_t column = 0; column < kPanel; ++column) {
      corrections[panel * kPanel + column] = kInputs == 4 ? static_cast<int32_t>(128 * totals[column]) : 0;
    }
  });
}

#define LLMSTACK_DYNAMIC_LINEAR(name, multiply, T, Out)                                                           \
  extern "C" void llmstack_##name(                                                                                \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const int8_t* packed, const int32_t* corrections, \
      const float* scales, int64_t in_features, int64_t out_features, const llmstack::T* bias,                    \
      const llmstack::Out* residual, llmstack::Out* out, int64_t activation) {                                    \
    llmstack::multiply(                                                                                           \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        in_features, llmstack::DynamicWeight{packed, corrections, scales});                                       \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(name)

LLMSTACK_DYNAMIC_LINEAR(linear_dynamic_f32, multiply_dynamic, Float32, Float32)
LLMSTACK_DYNAMIC_LINEAR(linear_dynamic_bf16, multiply_dynamic, BFloat16, BFloat16)
LLMSTACK_DYNAMIC_LINEAR(linear_dynamic_bf16_f32, multiply_dynamic, BFloat16, Float32)
LLMSTACK_DYNAMIC_LINEAR(linear_dynamic_f16, multiply_dynamic, Float16, Float16)
LLMSTACK_DYNAMIC_LINEAR(linear_dynamic_f16_f32, multiply_dynamic, Float16, Float32)
#if defined(__AVX512BF16__)
LLMSTACK_DYNAMIC_LINEAR(amx_linear_dynamic_f32, multiply_dynamic_by_tiles, Float32, Float32)
LLMSTACK_DYNAMIC_LINEAR(amx_linear_dynamic_bf16, multiply_dynamic_by_tiles, BFloat16, BFloat16)
LLMSTACK_DYNAMIC_LINEAR(amx_linear_dynamic_bf16_f32, multiply_dynamic_by_tiles, BFloat16, Float32)
LLMSTACK_DYNAMIC_LINEAR(amx_linear_dynamic_f16, multiply_dynamic_by_tiles, Float16, Float16)
LLMSTACK_DYNAMIC_LINEAR(amx_linear_dynamic_f16_f32, multiply_dynamic_by_tiles, Float16, Float32)
#endif
