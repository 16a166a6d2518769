// Weights rounded to integers with a scale per group of inputs, as quantization.py does it, in one pass over the memory.

#include <vector>

#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr int kMostFactors = 4;

// Integers from `lowest` to `largest`; `factors` take a group's largest weight to the scales to choose from.
struct Scheme {
  int64_t group_size;
  float lowest, largest;
  float factors[kMostFactors];
  int64_t num_factors;  // 1, or kMostFactors
};

// Fewer factors than kMostFactors have the first one again behind them, which is never chosen a second time.
inline Scheme make_scheme(int64_t group_size, int64_t lowest, int64_t largest, const float* factors,
                          int64_t num_factors) {
  Scheme scheme{group_size, static_cast<float>(lowest), static_cast<float>(largest), {},
                num_factors > 1 ? kMostFactors : 1};
  for (int i = 0; i < kMostFactors; ++i) scheme.factors[i] = factors[i < num_factors ? i : 0];
  return scheme;
}

// To nearest, ties to even, for numbers below 2^22.
inline Floats rounded(Floats x) {
  const Floats shifter = broadcast(0x1.8p23f);
  return (x + shifter) - shifter;
}

inline Floats integers_of(Floats weights, float inverse, const Scheme& scheme) {
  const Floats highest = broadcast(scheme.largest);
  const Floats raised = maximum(rounded(weights * inverse), broadcast(scheme.lowest));
  return raised < highest ? raised : highest;
}

// A row's groups. Each array is filled for all groups before the next one: the steps of one group wait for each other,
// and so the processor works at several groups at once.
struct Row {
  int64_t in_features, group_size;
  int64_t num_groups = (in_features + group_size - 1) / group_size;
  int64_t num_vectors = (group_size + kLanes - 1) / kLanes;      // of a group
  int64_t stride = (num_groups + kLanes - 1) / kLanes * kLanes;  // room for a number of each group
  Floats* weights = nullptr;                                     // [num_groups, num_vectors]
  float* tops = nullptr;                                         // [stride]: the largest magnitudes
  float *scales = nullptr, *inverses = nullptr;                  // [kMostFactors, stride]

  int64_t start(int64_t group) const { return group * group_size; }
  int64_t size(int64_t group) const { return group < num_groups - 1 ? group_size : in_features - start(group); }
  Floats* of(int64_t group) const { return weights + group * num_vectors; }
};

// The lanes behind the last input of a group are 0, which changes neither scale nor error.
template <class T>
void widen(const T* weight, const Row& row) {
  for (int64_t group = 0; group < row.num_groups; ++group) {
    Floats* found = row.of(group);
    Floats tops{};
    for_each_vector(row.size(group), [&](int64_t i, int n) {
      const Floats some = load_some(weight + row.start(group) + i, n);
      found[i / kLanes] = some;
      tops = maximum(tops, maximum(some, -some));
    });
    for (int64_t v = (row.size(group) + kLanes - 1) / kLanes; v < row.num_vectors; ++v) found[v] = Floats{};
    row.tops[group] = largest(tops);
  }
}

// Rounded scales and their inverses, for each of the scheme's factors.
inline void find_scales(const Row& row, const Scheme& scheme) {
  for (int64_t i = 0; i < scheme.num_factors; ++i) {
    for (int64_t group = 0; group < row.stride; group += kLanes) {
      const Floats scales = rounded_to<BFloat16>(load(row.tops + group) * scheme.factors[i]);
      store(row.scales + i * row.stride + group, scales);
      store(row.inverses + i * row.stride + group, scales > 0.0f ? 1.0f / scales : Floats{});
    }
  }
}

// Moves the scales with the least square error to the front, the first of equal ones. The best is taken without branches:
// which one it is cannot be predicted.
inline void choose_scales(const Row& row, const Scheme& scheme) {
  for (int64_t group = 0; group < row.num_groups; ++group) {
    float *scales = row.scales + group, *inverses = row.inverses + group;
    Floats totals[kMostFactors] = {};
    for (int64_t v = 0; v < row.num_vectors; ++v) {
      const Floats exact = row.of(group)[v];
      unrolled<kMostFactors>([&](auto i) __attribute__((always_inline)) {
        const Floats off = integers_of(exact, inverses[i * row.stride], scheme) * scales[i * row.stride] - exact;
        totals[i] = multiply_add(off, off, totals[i]);
      });
    }
    float errors[kMostFactors], least = sum(totals[0]);
    for (int i = 0; i < kMostFactors; ++i) {
      errors[i] = sum(totals[i]);
      least = errors[i] < least ? errors[i] : least;
    }
    uint32_t bests = 0;
    for (int i = 0; i < kMostFactors; ++i) bests |= static_cast<uint32_t>(errors[i] == least) << i;
    const int64_t best = bests ? __builtin_ctz(bests) : 0;  // none where a weight is a NaN
    scales[0] = scales[best * row.stride];
    inverses[0] = inverses[best * row.stride];
  }
}

inline void round_all(const Row& row, const Scheme& scheme, int8_t* integers, BFloat16* scales) {
  for (int64_t group = 0; group < row.num_groups; ++group) {
    scales[group] = to_bfloat16(row.scales[group]);
    for_each_vector(row.size(group), [&](int64_t i, int n) {
      const Floats found = integers_of(row.of(group)[i / kLanes], row.inverses[group], scheme);
      store_integers(integers + row.start(group) + i, found, n);
    });
  }
}

template <class T>
void quantize(const T* weight, int64_t out_features, int64_t in_features, const Scheme& scheme, int8_t* integers,
              BFloat16* scales) {
  for_each_row(out_features, in_features, [&](int64_t index) {
    // Plain memory: the allocator of a vector knows the alignment of its elements.
    static thread_local std::vector<Floats> weights;
    static thread_local std::vector<float> numbers;
    Row row{in_features, scheme.group_size};
    weights.resize(row.num_groups * row.num_vectors);
    numbers.resize(row.stride * (1 + 2 * kMostFactors));
    row.weights = weights.data();
    row.tops = numbers.data();
    row.scales = row.tops + row.stride;
    row.inverses = row.scales + kMostFactors * row.stride;
    widen(weight + index * in_features, row);
    find_scales(row, scheme);
    if (scheme.num_factors > 1) choose_scales(row, scheme);
    round_all(row, scheme, integers + index * in_features, scales + index * row.num_groups);
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_QUANTIZE(suffix, T)                                                                             \
  extern "C" void llmstack_quantize_##suffix(const llmstack::T* weight, int64_t out_features,                    \
                                             int64_t in_features, int64_t group_size, int64_t lowest,            \
                                             int64_t largest, const float* factors, int64_t num_factors,         \
                                             int8_t* integers, llmstack::BFloat16* scales) {                     \
    llmstack::quantize(weight, out_features, in_features,                                                        \
                       llmstack::make_scheme(group_size, lowest, largest, factors, num_factors), integers,       \
                       scales);                                                                                  \
  }

LLMSTACK_QUANTIZE(f32, Float32)
LLMSTACK_QUANTIZE(bf16, BFloat16)
LLMSTACK_QUANTIZE(f16, Float16)
