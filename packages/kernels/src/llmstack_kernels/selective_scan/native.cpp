// The scan of Mamba-1: token by token, some channels at a time.
//
// The sums over a channel's numbers have one order, so no cut of a prompt changes a bit.

#include "../native/repeat.h"
#include "../native/state_strip.h"

namespace llmstack {
namespace {

template <class T>
struct Lines {
  const T* first;
  int64_t stride;

  const T* of(int64_t token) const { return first + token * stride; }
};

template <class T>
struct SelectiveScan {
  Lines<T> x, steps, taken, asked;
  const float *log_decay, *step_bias, *skip;
  int64_t state_size, num_channels;
};

// The steps of some channels, by the library's function: vectors have none for logarithms.
inline Floats softplus_of(Floats x) {
  Floats y;
  for (int i = 0; i < kLanes; ++i) y[i] = softplus(x[i]);
  return y;
}

// Some channels, for all tokens [start, end) of a row.
template <class T>
void scan_channels(const SelectiveScan<T>& scan, const float* source, float* target, T* out, int64_t first, int64_t start,
                   int64_t end, int64_t known) {
  alignas(64) static thread_local Strip state, speeds;
  const int64_t size = scan.state_size, width = scan.num_channels;
  const int64_t count = width - first < kStrip ? width - first : kStrip;
  state.load_from(source + first, size, width, count);
  if (known == 0) state.store_to(target + first, size, width, count);
  speeds.load_from(scan.log_decay + first, size, width, count);
  for (int64_t i = 0; i < size * kStrip; i += kLanes) {
    store(speeds.columns + i, -exponential(load(speeds.columns + i)));
  }
  Floats bias[kStripVectors], skip[kStripVectors];
  for (int v = 0; v < kStripVectors; ++v) {
    bias[v] = Strip::vector(scan.step_bias + first, v, count);
    skip[v] = Strip::vector(scan.skip + first, v, count);
  }
  for (int64_t token = start; token < end; ++token) {
    Floats steps[kStripVectors], change[kStripVectors], answers[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) {
      const Floats input = Strip::vector(scan.x.of(token) + first, v, count);
      steps[v] = softplus_of(Strip::vector(scan.steps.of(token) + first, v, count) + bias[v]);
      change[v] = steps[v] * input;
      answers[v] = skip[v] * input;
    }
    const T *taken = scan.taken.of(token), *asked = scan.asked.of(token);
    for (int64_t i = 0; i < size; ++i) {
      const Floats own_taken = broadcast(to_float(taken[i])), own_asked = broadcast(to_float(asked[i]));
      for (int v = 0; v < kStripVectors; ++v) {
        float* place = state.columns + i * kStrip + v * kLanes;
        const Floats decay = exponential(load(speeds.columns + i * kStrip + v * kLanes) * steps[v]);
        const Floats updated = multiply_add(own_taken, change[v], load(place) * decay);
        store(place, updated);
        answers[v] = multiply_add(own_asked, updated, answers[v]);
      }
    }
    T* line = out + token * width + first;
    for (int v = 0; v < kStripVectors && v * kLanes < count; ++v) {
      const int64_t rest = count - v * kLanes;
      store_some(line + v * kLanes, answers[v], rest < kLanes ? static_cast<int>(rest) : kLanes);
    }
    if (token + 1 - start == known) state.store_to(target + first, size, width, count);
  }
}

}  // namespace
}  // namespace llmstack

// Rows of `x`, `steps`, `taken` and `asked`, and blocks of `states`, are `*_stride` apart.
#define LLMSTACK_SELECTIVE_SCAN(suffix, T)                                                                           \
  extern "C" void llmstack_selective_scan_##suffix(                                                                  \
      const llmstack::T* x, int64_t x_stride, const llmstack::T* steps, int64_t steps_stride,                        \
      const llmstack::T* taken, int64_t taken_stride, const llmstack::T* asked, int64_t asked_stride,                \
      const float* log_decay, const float* step_bias, const float* skip, float* states, int64_t states_stride,       \
      const int32_t* starts, const int64_t* sources, const int64_t* targets, const int64_t* known,                   \
      llmstack::T* out, int64_t num_rows, int64_t state_size, int64_t num_channels) {                                \
    using namespace llmstack;                                                                                        \
    const SelectiveScan<T> scan{{x, x_stride}, {steps, steps_stride}, {taken, taken_stride}, {asked, asked_stride},  \
                                log_decay,     step_bias,             skip,                  state_size,             \
                                num_channels};                                                                       \
    const int64_t strips = (num_channels + kStrip - 1) / kStrip;                                                     \
    for_each_chunk(num_rows * strips, [=](int64_t item) {                                                            \
      const int64_t strip = item % strips, row = item / strips;                                                      \
      scan_channels(scan, states + sources[row] * states_stride, states + targets[row] * states_stride, out,         \
                    strip * kStrip, starts[row], starts[row + 1], known[row]);                                       \
    });                                                                                                              \
  }                                                                                                                  \
  LLMSTACK_REPEATABLE(selective_scan_##suffix)

LLMSTACK_SELECTIVE_SCAN(f32, Float32)
LLMSTACK_SELECTIVE_SCAN(bf16, BFloat16)
LLMSTACK_SELECTIVE_SCAN(f16, Float16)
