// Rows of a table, one for each id, multiplied by a number and with something added.

#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

template <class T>
void embedding(const int64_t* ids, const T* table, const T* addend, T* out, int64_t num_ids, int64_t size,
               float scale) {
  for_each_row(num_ids, size, [=](int64_t row) {
    const T* source = table + ids[row] * size;
    T* target = out + row * size;
    if (addend == nullptr && scale == 1.0f) {
      std::memcpy(static_cast<void*>(target), source, size * sizeof(T));
      return;
    }
    for_each_vector(size, [&](int64_t i, int n) {
      Floats values = rounded_to<T>(load_some(source + i, n) * scale);
      if (addend != nullptr) values = values + load_some(addend + row * size + i, n);
      store_some(target + i, values, n);
    });
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_EMBEDDING(suffix, T)                                                                             \
  extern "C" void llmstack_embedding_##suffix(const int64_t* ids, const llmstack::T* table,                       \
                                              const llmstack::T* addend, llmstack::T* out, int64_t num_ids,       \
                                              int64_t size, float scale) {                                        \
    llmstack::embedding(ids, table, addend, out, num_ids, size, scale);                                           \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(embedding_##suffix)

LLMSTACK_EMBEDDING(f32, Float32)
LLMSTACK_EMBEDDING(bf16, BFloat16)
LLMSTACK_EMBEDDING(f16, Float16)
