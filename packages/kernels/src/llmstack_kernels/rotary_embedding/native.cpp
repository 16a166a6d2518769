// Rotary position embedding: the two halves of a head's first `rotary_dim` dimensions are the two coordinates.

#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

// Heads of one token are `head_dim` apart, tokens `stride`.
template <class T>
void rotate(const T* x, T* out, int64_t num_heads, int64_t head_dim, int64_t half, const float* cosines) {
  const float* sines = cosines + half;
  for (int64_t head = 0; head < num_heads; ++head, x += head_dim, out += head_dim) {
    for_each_vector(half, [&](int64_t i, int n) {
      const Floats first = load_some(x + i, n), second = load_some(x + half + i, n);
      const Floats cosine = load_some(cosines + i, n), sine = load_some(sines + i, n);
      store_some(out + i, first * cosine - second * sine, n);
      store_some(out + half + i, second * cosine + first * sine, n);
    });
    if (out != x) std::memcpy(static_cast<void*>(out + 2 * half), x + 2 * half, (head_dim - 2 * half) * sizeof(T));
  }
}

template <class T>
void rotary_embedding(const int64_t* positions, const T* query, int64_t query_stride, T* query_out, const T* key,
                      int64_t key_stride, T* key_out, const float* cos_sin, int64_t num_tokens, int64_t num_heads,
                      int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim) {
  for_each_row(num_tokens, (num_heads + num_kv_heads) * head_dim, [=](int64_t token) {
    const float* cosines = cos_sin + positions[token] * rotary_dim;
    rotate(query + token * query_stride, query_out + token * num_heads * head_dim, num_heads, head_dim, rotary_dim / 2,
           cosines);
    rotate(key + token * key_stride, key_out + token * num_kv_heads * head_dim, num_kv_heads, head_dim, rotary_dim / 2,
           cosines);
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_ROTARY_EMBEDDING(suffix, T)                                                                        \
  extern "C" void llmstack_rotary_embedding_##suffix(                                                               \
      const int64_t* positions, const llmstack::T* query, int64_t query_stride, llmstack::T* query_out,             \
      const llmstack::T* key, int64_t key_stride, llmstack::T* key_out, const float* cos_sin, int64_t num_tokens,   \
      int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim) {                              \
    llmstack::rotary_embedding(positions, query, query_stride, query_out, key, key_stride, key_out, cos_sin,        \
                               num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim);                          \
  }                                                                                                                 \
  LLMSTACK_REPEATABLE(rotary_embedding_##suffix)

LLMSTACK_ROTARY_EMBEDDING(f32, Float32)
LLMSTACK_ROTARY_EMBEDDING(bf16, BFloat16)
LLMSTACK_ROTARY_EMBEDDING(f16, Float16)
