// Convolution over the last few tokens of a row, each channel on its own.

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr int64_t kChannelsPerChunk = 512;

template <class T>
void causal_convolution(const T* x, int64_t stride, const float* taps, const float* bias, T* tails, int64_t tail_stride,
                        const int32_t* starts, const int64_t* sources, const int64_t* targets, const int64_t* known,
                        T* out, int64_t num_rows, int64_t num_channels, int64_t length, Activation activation) {
  const int64_t width = length - 1, num_chunks = (num_channels + kChannelsPerChunk - 1) / kChannelsPerChunk;
  for_each_chunk(num_rows * num_chunks, [=](int64_t chunk) {
    const int64_t row = chunk / num_chunks, first = chunk % num_chunks * kChannelsPerChunk;
    const int64_t rest = num_channels - first, count = rest < kChannelsPerChunk ? rest : kChannelsPerChunk;
    const T* own = x + starts[row] * stride + first;
    const T* before = tails + sources[row] * tail_stride + first;
    // Of the row's token `index`, or of one before the row, down to -width.
    const auto input = [=](int64_t index) {
      return index < 0 ? before + (index + width) * num_channels : own + index * stride;
    };
    for (int64_t token = 0; token < starts[row + 1] - starts[row]; ++token) {
      T* target = out + (starts[row] + token) * num_channels + first;
      for_each_vector(count, [&](int64_t i, int n) {
        Floats total = load_some(input(token - width) + i, n) * load_some(taps + first + i, n);
        for (int64_t tap = 1; tap < length; ++tap) {
          const Floats factors = load_some(taps + tap * num_channels + first + i, n);
          total = multiply_add(load_some(input(token - width + tap) + i, n), factors, total);
        }
        if (bias != nullptr) total = total + load_some(bias + first + i, n);
        store_some(target + i, activate(total, activation), n);
      });
    }
    for (int64_t place = 0; place < width; ++place) {
      T* target = tails + targets[row] * tail_stride + place * num_channels + first;
      std::memcpy(target, input(known[row] - width + place), count * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace llmstack

// `stride` is the distance of tokens in x, `tail_stride` that of blocks; `bias` may be null.
#define LLMSTACK_CAUSAL_CONVOLUTION(suffix, T)                                                                       \
  extern "C" void llmstack_causal_convolution_##suffix(                                                              \
      const llmstack::T* x, int64_t stride, const float* taps, const float* bias, llmstack::T* tails,                \
      int64_t tail_stride, const int32_t* starts, const int64_t* sources, const int64_t* targets,                    \
      const int64_t* known, llmstack::T* out, int64_t num_rows, int64_t num_channels, int64_t length,                \
      int64_t activation) {                                                                                          \
    llmstack::causal_convolution(x, stride, taps, bias, tails, tail_stride, starts, sources, targets, known, out,    \
                                 num_rows, num_channels, length, static_cast<llmstack::Activation>(activation));     \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(causal_convolution_##suffix)

LLMSTACK_CAUSAL_CONVOLUTION(f32, Float32)
LLMSTACK_CAUSAL_CONVOLUTION(bf16, BFloat16)
LLMSTACK_CAUSAL_CONVOLUTION(f16, Float16)
