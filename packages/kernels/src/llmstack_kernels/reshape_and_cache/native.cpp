// Writes a step's keys and values to their slots of the paged storage: [num_blocks, num_kv_heads, block_size, head_dim].

#include <cstdint>
#include <cstring>

#include "../native/repeat.h"
#include "../native/threads.h"

namespace {

struct Storage {
  char* cache;
  int64_t block_bytes;  // from block to block
  int64_t num_kv_heads, block_size, head_bytes;

  void write(const char* heads, int64_t slot) const {
    if (slot < 0) return;  // padding
    const int64_t block = slot / block_size, offset = slot % block_size;
    char* target = cache + block * block_bytes;
    // A block's first slot clears the rest: readers of whole blocks must not see values of an earlier owner.
    if (offset == 0) std::memset(target, 0, num_kv_heads * block_size * head_bytes);
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      std::memcpy(target + (head * block_size + offset) * head_bytes, heads + head * head_bytes, head_bytes);
    }
  }
};

}  // namespace

// Strides are between tokens, those of a cache between blocks; they and `head_bytes` are in bytes. Values may be null.
extern "C" void llmstack_reshape_and_cache(const char* key, int64_t key_stride, const char* value,
                                           int64_t value_stride, char* key_cache, int64_t key_cache_stride,
                                           char* value_cache, int64_t value_cache_stride, const int64_t* slots,
                                           int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                                           int64_t head_bytes) {
  const Storage keys{key_cache, key_cache_stride, num_kv_heads, block_size, head_bytes};
  const Storage values{value_cache, value_cache_stride, num_kv_heads, block_size, head_bytes};
  const auto write_keys = [&](int64_t token) { keys.write(key + token * key_stride, slots[token]); };
  const auto write_values = [&](int64_t token) {
    if (value != nullptr) values.write(value + token * value_stride, slots[token]);
  };
  // In order, since a block's first slot clears the ones after it; keys on one thread, values on another.
  constexpr int64_t kSerialBytes = 1 << 16;
  if (num_tokens * num_kv_heads * head_bytes < kSerialBytes) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      write_keys(token);
      write_values(token);
    }
    return;
  }
  llmstack::for_each_chunk(2, [&](int64_t chunk) {
    for (int64_t token = 0; token < num_tokens; ++token) chunk ? write_values(token) : write_keys(token);
  });
}

LLMSTACK_REPEATABLE(reshape_and_cache)
