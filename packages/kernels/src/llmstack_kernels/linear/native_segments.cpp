// Linear layers whose inputs are rounded to integers of 8 bits, a segment at a time, and whose weights are small numbers.

#include <vector>

#include "../native/repeat.h"
#include "native.h"
#include "native_segment_formats.h"

namespace llmstack {
namespace {

// Segments without a larger input become zeros, since 127 divided by their largest would be infinite.
constexpr float kSmallestInput = 1e-30f;

// Integers, scale and second number of a segment. One with a NaN or an infinite input gets zeros and the scale NaN.
template <class T>
void round_segment(const T* x, int64_t size, const SegmentKind& kind, int8_t* integers, float* scale, int32_t* second) {
  Floats top = {}, nan = {};
  for_each_vector(size, [&](int64_t i, int n) {
    const Floats v = load_some(x + i, n);
    top = maximum(top, maximum(v, -v));
    nan = nan + (v - v);  // 0, or NaN where v is infinite or none
  });
  const float largest_input = largest(top), check = sum(nan);
  const float inverse = largest_input > kSmallestInput && check == 0.0f ? 127.0f / largest_input : 0.0f;
  const Floats shifter = broadcast(0x1.8p23f);  // rounds to an integer, ties to even
  Floats total = {};
  for_each_vector(size, [&](int64_t i, int n) {
    Floats v = load_some(x + i, n) * inverse;
    if (check != 0.0f) v = Floats{};
    const Floats rounded = (v + shifter) - shifter;
    store_integers(integers + i, rounded, n);
    total = total + rounded;
  });
  const float all = sum(total);  // exact
  *scale = largest_input / 127.0f + check;
  const float as_float = kind.zeros == Zeros::kPoints ? all : *scale * all;
  *second = kind.zeros == Zeros::kMiddle ? -kind.middle * static_cast<int32_t>(all) : bits_as<int32_t>(as_float);
}

// What is written of a row lies `stride` segments apart.
template <class T>
void round_row(const T* x, int64_t size, const SegmentKind& kind, int64_t stride, int8_t* integers, float* scales,
               int32_t* seconds) {
  for (int64_t i = 0, at = 0; i < size; i += kind.inputs, at += stride) {
    const int64_t rest = size - i, own = rest < kind.inputs ? rest : kind.inputs;
    if (own < kind.inputs) std::memset(integers + at * kind.inputs, 0, kind.inputs);
    round_segment(x + i, own, kind, integers + at * kind.inputs, scales + at, seconds + at);
  }
}

template <class T>
void multiply_segments(const LinearCall<T>& call, int64_t in_features, const uint8_t* packed, const SegmentKind& kind,
                       const SegmentLayout& layout) {
  static thread_local std::vector<int8_t> all_integers;
  static thread_local std::vector<float> all_scales;
  static thread_local std::vector<int32_t> all_seconds;
  const int64_t segments = (in_features + kind.inputs - 1) / kind.inputs, panel_bytes = layout.panel_bytes(segments);
  // Rows in blocks, whose sums wait for bias and activation. An odd distance, so that segments share no set of a cache.
  const int64_t stride = (call.num_rows < kBlockRows ? call.num_rows : kBlockRows) | 1, size = segments * stride;
  const int64_t blocks = (call.num_rows + kBlockRows - 1) / kBlockRows;
  all_integers.resize(blocks * size * kind.inputs);
  all_scales.resize(blocks * size);
  all_seconds.resize(blocks * size);
  int8_t* integers = all_integers.data();  // other threads have vectors of their own
  float* scales = all_scales.data();
  int32_t* seconds = all_seconds.data();
  for_each_row(call.num_rows, in_features, [&](int64_t row) {
    const int64_t at = row / kBlockRows * size + row % kBlockRows;
    round_row(call.x + row * call.row_stride, in_features, kind, stride, integers + at * kind.inputs, scales + at, seconds + at);
  });
  for_each_panel(call, panel_bytes, [&](int64_t panel, int64_t row, int64_t end) {
    static thread_local std::vector<Floats> memory;
    memory.resize(kBlockRows * kVectors);
    Floats* sums = memory.data();
    for (; row < end; row += kBlockRows) {  // from the first of a block
      const int64_t at = row / kBlockRows * size, count = row + kBlockRows < end ? kBlockRows : end - row;
      const RoundedRows rows{integers + at * kind.inputs, scales + at, seconds + at, segments, stride};
      kind.add_rows(packed + panel * panel_bytes, layout, rows, count, panel_bytes, sums);
      store_sums(call, row, static_cast<int>(count), panel * kPanel, kVectors, sums);
    }
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_SEGMENTS_LINEAR(suffix, T, Out)                                                                  \
  extern "C" void llmstack_linear_segments_##suffix(                                                              \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const uint8_t* packed, int64_t format,          \
      int64_t scales, int64_t segments_per_block, int64_t in_features, int64_t out_features,                      \
      const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out, int64_t activation) {           \
    const llmstack::SegmentKind& kind = llmstack::segment_kind(format);                                           \
    llmstack::multiply_segments(                                                                                  \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        in_features, packed, kind,                                                                                \
        kind.layout(static_cast<llmstack::SegmentScales>(scales), segments_per_block));                           \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(linear_segments_##suffix)

LLMSTACK_SEGMENTS_LINEAR(f32, Float32, Float32)
LLMSTACK_SEGMENTS_LINEAR(bf16, BFloat16, BFloat16)
LLMSTACK_SEGMENTS_LINEAR(bf16_f32, BFloat16, Float32)
LLMSTACK_SEGMENTS_LINEAR(f16, Float16, Float16)
LLMSTACK_SEGMENTS_LINEAR(f16_f32, Float16, Float32)
