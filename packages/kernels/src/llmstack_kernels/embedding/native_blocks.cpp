// Rows of a table in blocks of a GGUF file, as they lie there.

#include "../linear/native_blocks.h"
#include "../native/repeat.h"
#include "finish_row.h"

namespace llmstack {
namespace {

// A number is rounded to the type before the factor, as in a widened table.
template <class T, class Block>
void embedding_blocks(const int64_t* ids, const uint8_t* blocks, const T* addend, T* out, int64_t num_ids, int64_t size,
                      float scale) {
  const int64_t count = size / kBlockInputs<Block>;
  for_each_row(num_ids, size, [=](int64_t row) {
    const uint8_t* source = blocks + ids[row] * count * Block::kBytes;
    T* target = out + row * size;
    float numbers[kBlockInputs<Block>];
    BlockWriter<Block> writer{numbers};
    for (int64_t i = 0; i < count; ++i) {
      Block::read(source + i * Block::kBytes, writer, 0);
      for_each_vector(kBlockInputs<Block>, [&](int64_t at, int n) {
        store_some(target + i * kBlockInputs<Block> + at, load_some(numbers + at, n), n);
      });
    }
    if (addend != nullptr || scale != 1.0f) finish_row(target, addend ? addend + row * size : nullptr, target, size, scale);
  });
}

template <class T, class... Types>
auto embedding_blocks_of(Blocks<Types...>, int64_t type) {
  static constexpr decltype(&embedding_blocks<T, ByteBlock>) kFunctions[] = {&embedding_blocks<T, Types>...};
  return kFunctions[type];
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_EMBEDDING_BLOCKS(suffix, T)                                                                      \
  extern "C" void llmstack_embedding_blocks_##suffix(const int64_t* ids, const uint8_t* blocks, int64_t type,     \
                                                     const llmstack::T* addend, llmstack::T* out,                 \
                                                     int64_t num_ids, int64_t size, float scale) {                \
    llmstack::embedding_blocks_of<llmstack::T>(llmstack::AllBlocks(), type)(ids, blocks, addend, out, num_ids,    \
                                                                            size, scale);                         \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(embedding_blocks_##suffix)

LLMSTACK_EMBEDDING_BLOCKS(f32, Float32)
LLMSTACK_EMBEDDING_BLOCKS(bf16, BFloat16)
LLMSTACK_EMBEDDING_BLOCKS(f16, Float16)
