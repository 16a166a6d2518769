// The last pass over a row of a table: a factor, and what is added.
#pragma once

#include "../native/rows.h"

namespace llmstack {

template <class T>
inline void finish_row(const T* source, const T* addend, T* target, int64_t size, float scale) {
  for_each_vector(size, [&](int64_t i, int n) {
    Floats values = rounded_to<T>(load_some(source + i, n) * scale);
    if (addend != nullptr) values = values + load_some(addend + i, n);
    store_some(target + i, values, n);
  });
}

}  // namespace llmstack
