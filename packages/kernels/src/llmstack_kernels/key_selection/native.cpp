// Selection of keys by an indexer.
//
// A key's score is the sum over the heads of weight * max(0, query · key). Products add their terms in ascending order, and
// a score its heads, each lane for itself. So a score depends on its query and its key alone, and what is selected on the
// token's context alone: it is the same in any batch and any cut of a prompt.

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "../native/repeat.h"
#include "../native/threads.h"
#include "../paged_attention/operands.h"

namespace llmstack {
namespace {

constexpr int64_t kScoresAtOnce = 1 << 20;  // of tokens of one row: 4 MiB

// Eight bytes a field, in the order of `_ARGUMENTS` in native.py.
template <class T>
struct Selection {
  int32_t* out;          // [num_tokens, num_selected]
  const T* query;        // [num_tokens, num_heads, head_dim]
  const float* weights;  // [num_tokens, num_heads]
  const T* cache;        // [num_blocks, block_size, head_dim]
  int64_t block_stride;
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, ...]
  int64_t block_table_stride;
  int64_t num_rows, num_heads, head_dim, block_size, num_selected;
};

// Neighbouring tokens of a row, whose scores are kept together.
struct Tokens {
  int64_t row, first, count;
  int64_t first_position;  // in the context
  int64_t stride;          // scores from one token to the next: whole tiles
};

template <class T>
void pack_tile(const Selection<T>& call, const Tokens& tokens, int64_t start, int64_t end, Words* packed) {
  thread_local std::vector<Words> zeros;
  zeros.resize(std::max<int64_t>(zeros.size(), call.head_dim / kLanes));
  const int32_t* blocks = call.block_tables + tokens.row * call.block_table_stride;
  const T* keys[kTileKeys];
  for (int64_t i = 0; i < kTileKeys; ++i) {
    const int64_t position = start + i, block = position / call.block_size, slot = position % call.block_size;
    keys[i] = position < end ? call.cache + blocks[block] * call.block_stride + slot * call.head_dim
                             : reinterpret_cast<const T*>(zeros.data());
  }
  Fetch nothing;
  pack_keys(keys, call.head_dim, kTileVectors, packed, nothing);
}

// Scores of the keys of a tile, of each of the tokens that see more keys than are selected.
template <class T>
void score_tile(const Selection<T>& call, const Tokens& tokens, int64_t tile, float* scores) {
  using Word = typename Operand<T>::Word;
  using Element = typename Operand<T>::Element;
  thread_local std::vector<Words> packed, operands;
  const int64_t start = tile * kTileKeys, size = call.num_heads * call.head_dim, steps = call.head_dim / kPerWord<T>;
  packed.resize(kTileVectors * call.head_dim);
  operands.resize((size * sizeof(Element) + sizeof(Words) - 1) / sizeof(Words));
  pack_tile(call, tokens, start, tokens.first_position + tokens.count, packed.data());
  const int64_t first = std::max<int64_t>(0, std::max(start, call.num_selected) - tokens.first_position);
  for (int64_t i = first; i < tokens.count; ++i) {
    Element* own = reinterpret_cast<Element*>(operands.data());
    const T* query = call.query + (tokens.first + i) * size;
    for (int64_t place = 0; place < size; place += kLanes) store(own + place, load(query + place));
    const float* weights = call.weights + (tokens.first + i) * call.num_heads;
    Floats totals[kTileVectors] = {};
    for (int64_t head = 0; head < call.num_heads; head += kRowBlock) {
      const int rows = static_cast<int>(std::min<int64_t>(kRowBlock, call.num_heads - head));
      Floats sums[kRowBlock * kTileVectors];
      Fetch nothing;
      multiply(Product<Word>{reinterpret_cast<const Word*>(operands.data()) + head * steps, steps, packed.data(),
                             kTileVectors, steps, sums, kTileVectors, nullptr},
               rows, kTileVectors, nothing);
      for (int row = 0; row < rows; ++row) {
        const Floats weight = broadcast(weights[head + row]);
        for (int v = 0; v < kTileVectors; ++v) {
          totals[v] = multiply_add(weight, maximum(sums[row * kTileVectors + v], Floats{}), totals[v]);
        }
      }
    }
    for (int v = 0; v < kTileVectors; ++v) store(scores + i * tokens.stride + start + v * kLanes, totals[v]);
  }
}

// Whole numbers in the order of the scores.
inline uint32_t rank_of(float score) {
  const uint32_t bits = bits_as<uint32_t>(score + 0.0f);  // one zero
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The positions of the `count` highest scores, ascending; of equal ones the first.
void select(const float* scores, int64_t num_keys, int64_t count, int32_t* out) {
  if (num_keys <= count) {
    std::iota(out, out + num_keys, 0);
    std::fill(out + num_keys, out + count, 0);
    return;
  }
  thread_local std::vector<uint32_t> ranks, sorted;
  ranks.resize(num_keys);
  std::transform(scores, scores + num_keys, ranks.begin(), rank_of);
  sorted = ranks;
  std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<uint32_t>());
  const uint32_t least = sorted[count - 1];
  int64_t num_least = count - std::count_if(ranks.begin(), ranks.end(), [=](uint32_t rank) { return rank > least; });
  for (int64_t key = 0; key < num_keys; ++key) {
    if (ranks[key] > least || (ranks[key] == least && num_least-- > 0)) *out++ = static_cast<int32_t>(key);
  }
}

template <class T>
void select_for(const Selection<T>& call, const Tokens& tokens, float* scores) {
  const int64_t num_keys = tokens.first_position + tokens.count;
  if (num_keys > call.num_selected) {
    for_each_chunk(tokens.stride / kTileKeys, [&](int64_t tile) { score_tile(call, tokens, tile, scores); });
  }
  for_each_chunk(tokens.count, [&](int64_t i) {
    int32_t* out = call.out + (tokens.first + i) * call.num_selected;
    select(scores + i * tokens.stride, tokens.first_position + i + 1, call.num_selected, out);
  });
}

template <class T>
void run(const Selection<T>& call) {
  thread_local std::vector<float> scores;
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t end = call.query_start_loc[row + 1], num_before = call.seq_lens[row] - end;
    const int64_t stride = (call.seq_lens[row] + kTileKeys - 1) / kTileKeys * kTileKeys;
    const int64_t at_once = std::max<int64_t>(1, kScoresAtOnce / std::max<int64_t>(stride, 1));
    for (int64_t first = call.query_start_loc[row]; first < end; first += at_once) {
      const int64_t count = std::min(at_once, end - first), position = num_before + first;
      const Tokens tokens{row, first, count, position, (position + count + kTileKeys - 1) / kTileKeys * kTileKeys};
      scores.resize(std::max<int64_t>(scores.size(), tokens.count * tokens.stride));
      select_for(call, tokens, scores.data());
    }
  }
}

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_select_keys_f32(const llmstack::Selection<llmstack::Float32>* call) { llmstack::run(*call); }
extern "C" void llmstack_select_keys_bf16(const llmstack::Selection<llmstack::BFloat16>* call) { llmstack::run(*call); }
extern "C" void llmstack_select_keys_f16(const llmstack::Selection<llmstack::Float16>* call) { llmstack::run(*call); }
LLMSTACK_REPEATABLE(select_keys_f32)
LLMSTACK_REPEATABLE(select_keys_bf16)
LLMSTACK_REPEATABLE(select_keys_f16)
