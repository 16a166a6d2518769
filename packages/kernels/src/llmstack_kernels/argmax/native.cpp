// The largest value of each row, NaN if there is any, and its lowest index.

#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

// NaN where any value is NaN.
float largest_of(const float* values, int64_t size) {
  Floats best = broadcast(values[0]), nan = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = load(values + i);
    best = maximum(x, best);
    nan = x == x ? nan : x;
  }
  float found = largest(best);
  for (; i < size; ++i) found = values[i] > found || values[i] != values[i] ? values[i] : found;
  for (int lane = 0; lane < kLanes; ++lane) found = nan[lane] != nan[lane] ? nan[lane] : found;
  return found;
}

int64_t first_place(const float* values, int64_t size, float wanted) {
  constexpr int64_t kBlock = 16 * kLanes;
  const bool wants_nan = wanted != wanted;
  int64_t block = 0;
  for (; block + kBlock <= size; block += kBlock) {  // blocks without it are skipped
    Ints hits = {};
    for (int64_t i = block; i < block + kBlock; i += kLanes) {
      const Floats x = load(values + i);
      hits |= wants_nan ? x != x : x == broadcast(wanted);
    }
    bool has_hit = false;
    for (int lane = 0; lane < kLanes; ++lane) has_hit |= hits[lane] != 0;
    if (has_hit) break;
  }
  for (; block < size; ++block) {
    if (values[block] == wanted || (wants_nan && values[block] != values[block])) break;
  }
  return block;
}

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_argmax_f32(const float* values, float* best, int64_t* indices, int64_t num_rows,
                                           int64_t size) {
  llmstack::for_each_row(num_rows, size, [=](int64_t row) {
    const float* own = values + row * size;
    best[row] = llmstack::largest_of(own, size);
    indices[row] = llmstack::first_place(own, size, best[row]);
  });
}
LLMSTACK_REPEATABLE(argmax_f32)
