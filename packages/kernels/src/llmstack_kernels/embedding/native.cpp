// Rows of a table, one for each id, multiplied by a number and with something added.

#include "../linear/native_operands.h"
#include "../native/repeat.h"
#include "finish_row.h"

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
    finish_row(source, addend ? addend + row * size : nullptr, target, size, scale);
  });
}

// The same of a table that a linear layer has packed. Each step of inputs of a row lies in another line of memory, so a row
// takes as many reads as it has steps, and prefetches those of the next row. That is little beside the row's products.
template <class T>
void embedding_packed(const int64_t* ids, const T* packed, const T* addend, T* out, int64_t num_ids, int64_t size,
                      float scale) {
  constexpr int64_t kStride = kPanel * kStep<T>;  // from step to step
  const auto source_of = [=](int64_t row) {
    return packed + ids[row] / kPanel * num_steps<T>(size) * kStride + ids[row] % kPanel * kStep<T>;
  };
  for_each_row(num_ids, size, [=](int64_t row) {
    const T *source = source_of(row), *next = source_of(row + 1 < num_ids ? row + 1 : row);
    T* target = out + row * size;
    for (int64_t step = 0; step < size / kStep<T>; ++step) {
      __builtin_prefetch(next + step * kStride);
      std::memcpy(static_cast<void*>(target + step * kStep<T>), source + step * kStride, kStep<T> * sizeof(T));
    }
    if (size % kStep<T> != 0) target[size - 1] = source[size / kStep<T> * kStride];
    if (addend != nullptr || scale != 1.0f) finish_row(target, addend ? addend + row * size : nullptr, target, size, scale);
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
  extern "C" void llmstack_embedding_packed_##suffix(const int64_t* ids, const llmstack::T* packed,               \
                                                     const llmstack::T* addend, llmstack::T* out,                 \
                                                     int64_t num_ids, int64_t size, float scale) {                \
    llmstack::embedding_packed(ids, packed, addend, out, num_ids, size, scale);                                   \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(embedding_packed_##suffix)                                                                  \
  extern "C" void llmstack_embedding_part_##suffix(const int64_t* ids, const llmstack::T* table, llmstack::T* out, \
                                                   int64_t num_ids, int64_t size, int64_t first_id,               \
                                                   int64_t num_rows, float scale) {                               \
    llmstack::embedding_part(ids, table, out, num_ids, size, first_id, num_rows, scale);                          \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(embedding_part_##suffix)

LLMSTACK_EMBEDDING(f32, Float32)
LLMSTACK_EMBEDDING(bf16, BFloat16)
LLMSTACK_EMBEDDING(f16, Float16)
