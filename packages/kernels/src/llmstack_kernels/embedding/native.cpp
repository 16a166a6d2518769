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

// The table has the rows [first_id, first_id + num_rows) of a larger one; rows of other ids are zeros.
template <class T>
void embedding_part(const int64_t* ids, const T* table, T* out, int64_t num_ids, int64_t size, int64_t first_id,
                    int64_t num_rows, float scale) {
  for_each_row(num_ids, size, [=](int64_t row) {
    const int64_t place = ids[row] - first_id;
    T* target = out + row * size;
    if (place < 0 || place >= num_rows) {
      std::memset(static_cast<void*>(target), 0, size * sizeof(T));
      return;
    }
    for_each_vector(size, [&](int64_t i, int n) {
      store_some(target + i, load_some(table + place * size + i, n) * scale, n);
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
  LLMSTACK_REPEATABLE(embedding_##suffix)                                                                         \
  extern "C" void llmstack_embedding_part_##suffix(const int64_t* ids, const llmstack::T* table, llmstack::T* out, \
                                                   int64_t num_ids, int64_t size, int64_t first_id,               \
                                                   int64_t num_rows, float scale) {                               \
    llmstack::embedding_part(ids, table, out, num_ids, size, first_id, num_rows, scale);                          \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(embedding_part_##suffix)

LLMSTACK_EMBEDDING(f32, Float32)
LLMSTACK_EMBEDDING(bf16, BFloat16)
LLMSTACK_EMBEDDING(f16, Float16)
