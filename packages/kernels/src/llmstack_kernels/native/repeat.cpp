#include "repeat.h"

namespace {

struct RecordedCall {
  void (*function)(const int64_t* words);
  const int64_t* words;
};

}  // namespace

extern "C" void llmstack_repeat(const RecordedCall* calls, int64_t num_calls) {
  for (int64_t i = 0; i < num_calls; ++i) calls[i].function(calls[i].words);
}
