// Packing of small numbers into the words of panels, and inputs in the order of a weight's columns.

#include "../native/repeat.h"
#include "native_numbers.h"

namespace llmstack {
namespace {

template <int kBits>
inline uint32_t word_of(const uint8_t* numbers, int64_t size, uint32_t flipped) {
  uint32_t word = 0;
  for (int i = 0; i < size; ++i) word |= (numbers[i] ^ flipped) << shift_of(kBits, i);
  return word;
}

// Some words of all columns after another, so that what is written stays in the first-level cache. `flipped` are bits to
// change in each number: the highest one gives a sign.
template <int kBits>
void pack_words(const uint8_t* numbers, uint32_t* packed, int64_t in_features, int64_t out_features,
                uint32_t flipped) {
  constexpr int64_t kInputs = 32 / kBits, kStepsAtOnce = 16;
  const int64_t whole_steps = in_features / kInputs, steps = (in_features + kInputs - 1) / kInputs;
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    uint32_t* out = packed + panel * steps * kPanel;
    const int64_t columns = columns_of(panel, out_features);
    if (columns < kPanel) std::memset(out, 0, steps * kPanel * sizeof(uint32_t));
    for (int64_t start = 0; start < steps; start += kStepsAtOnce) {
      const int64_t end = start + kStepsAtOnce < whole_steps ? start + kStepsAtOnce : whole_steps;
      for (int64_t column = 0; column < columns; ++column) {
        const uint8_t* row = numbers + (panel * kPanel + column) * in_features;
        for (int64_t step = start; step < end; ++step) {
          out[step * kPanel + column] = word_of<kBits>(row + step * kInputs, kInputs, flipped);
        }
      }
    }
    for (int64_t column = 0; column < columns && whole_steps < steps; ++column) {
      const uint8_t* rest = numbers + (panel * kPanel + column) * in_features + whole_steps * kInputs;
      out[whole_steps * kPanel + column] = word_of<kBits>(rest, in_features - whole_steps * kInputs, flipped);
    }
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

#define LLMSTACK_STORED_PACK(bits)                                                                                  \
  extern "C" void llmstack_linear_pack_stored_##bits(const uint8_t* numbers, uint32_t* packed, int64_t in_features, \
                                                     int64_t out_features, int64_t flipped) {                       \
    llmstack::pack_words<bits>(numbers, packed, in_features, out_features, static_cast<uint32_t>(flipped));         \
  }
#define LLMSTACK_GATHER_COLUMNS(suffix, T)                                                                        \
  extern "C" void llmstack_gather_columns_##suffix(const llmstack::T* x, int64_t num_rows, int64_t row_stride,    \
                                                   const int32_t* order, int64_t size, llmstack::T* out) {        \
    llmstack::gather_columns(x, num_rows, row_stride, order, size, out);                                          \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(gather_columns_##suffix)

LLMSTACK_STORED_PACK(4)
LLMSTACK_STORED_PACK(8)
LLMSTACK_GATHER_COLUMNS(f32, Float32)
LLMSTACK_GATHER_COLUMNS(bf16, BFloat16)
LLMSTACK_GATHER_COLUMNS(f16, Float16)
