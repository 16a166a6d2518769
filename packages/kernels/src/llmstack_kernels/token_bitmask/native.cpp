// Logits set to minus infinity where a bit is 0.

#include <cstdint>
#include <limits>

#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr int64_t kWordBits = 32;
constexpr float kBarred = -std::numeric_limits<float>::infinity();

// Without a branch: which tokens a grammar allows is no pattern that a processor could guess.
void bar(float* logits, uint32_t word, int64_t num_tokens) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    logits[token] = (word >> token) & 1 ? logits[token] : kBarred;
  }
}

void bar_row(float* logits, const uint32_t* words, int64_t vocab_size) {
  const int64_t num_whole = vocab_size / kWordBits;
  for (int64_t i = 0; i < num_whole; ++i) {
    if (words[i] != ~uint32_t{0}) bar(logits + i * kWordBits, words[i], kWordBits);
  }
  const int64_t rest = vocab_size % kWordBits;
  if (rest) bar(logits + num_whole * kWordBits, words[num_whole], rest);
}

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_token_bitmask_f32(float* logits, const int64_t* rows, const uint32_t* bits, int64_t num_rows,
                                           int64_t vocab_size) {
  const int64_t num_words = (vocab_size + llmstack::kWordBits - 1) / llmstack::kWordBits;
  llmstack::for_each_row(num_rows, vocab_size, [=](int64_t i) {
    llmstack::bar_row(logits + rows[i] * vocab_size, bits + i * num_words, vocab_size);
  });
}
