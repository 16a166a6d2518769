// Lets a captured call be replayed from its arguments alone, each as a word of 64 bits.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.h"

namespace llmstack {

template <class Argument>
Argument argument_from(int64_t word) {
  if constexpr (std::is_same_v<Argument, float>) {
    return bits_as<float>(static_cast<int32_t>(word));
  } else if constexpr (std::is_pointer_v<Argument>) {
    return reinterpret_cast<Argument>(word);
  } else {
    return static_cast<Argument>(word);
  }
}

template <class... Arguments, size_t... kIndices>
void call_with_words(void (*function)(Arguments...), const int64_t* words, std::index_sequence<kIndices...>) {
  function(argument_from<Arguments>(words[kIndices])...);
}

template <class... Arguments>
void call_with(void (*function)(Arguments...), const int64_t* words) {
  call_with_words(function, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace llmstack

// Beside every function of an operation: the same function, called with words.
#define LLMSTACK_REPEATABLE(name)                                            \
  extern "C" void llmstack_##name##_with_words(const int64_t* words) {       \
    llmstack::call_with(llmstack_##name, words);                             \
  }
