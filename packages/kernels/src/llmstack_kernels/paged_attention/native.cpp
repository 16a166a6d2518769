// Attention over keys and values that lie in blocks, for decodes and prefill chunks alike.
//
// A context is cut into tiles at multiples of 64 positions. A tile's keys and values are laid out for multiplication once
// and serve all queries of an item of work: several tokens and the heads that share the KV head. Softmax is taken tile after
// tile with a running maximum. Since the tiles do not move, a token's result depends on its own context only: it is bit-equal
// alone and in any batch, decoded and prefilled, in one chunk or many.

#include <algorithm>
#include <vector>

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/threads.h"
#include "operands.h"

namespace llmstack {
namespace {

constexpr int64_t kItemQueries = 96;  // queries per item of a prefill: enough to repay the laying out of tiles

template <class T>
struct Call {
  T* out;          // [num_tokens, num_heads, head_dim]
  const T* query;  // the same shape, strided
  int64_t query_token_stride, query_head_stride;
  const T *key_cache, *value_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
  int64_t key_block_stride, value_block_stride;
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, ...]
  int64_t block_table_stride;
  const float* alibi_slopes;  // [num_heads] or null
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size;
  float scale, soft_cap;   // no cap: 0
  int64_t sliding_window;  // none: more than any context has

  int64_t group() const { return num_heads / num_kv_heads; }
};

// Neighbouring tokens of one row, with the query heads of some KV heads.
struct Item {
  int64_t row;
  int64_t first_token;     // in all the rows' tokens
  int64_t first_position;  // that token's, in the context
  int64_t num_tokens;
  int64_t first_head, num_heads;  // KV heads

  int64_t end_position() const { return first_position + num_tokens; }
  int64_t cost() const { return num_tokens * num_heads * end_position(); }
};

// Where a tile's keys and values lie. Positions that the item does not see stand on zeros: their slots may hold anything.
template <class T>
struct Tile {
  int64_t kv_head, start;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
};

// A thread's memory, kept between calls.
struct Scratch {
  std::vector<Words> queries, keys, values, weights, zeros;
  std::vector<Floats> scores, sums, totals;
  std::vector<float> maxima;

  void reserve(int64_t num_queries, int64_t head_dim) {
    grow(queries, num_queries * head_dim / kLanes);
    grow(keys, head_dim * kTileVectors);
    grow(values, kTileKeys * head_dim / kLanes);
    grow(weights, kRowBlock * kTileVectors);
    grow(zeros, head_dim / kLanes);
    grow(scores, kRowBlock * kTileVectors);
    grow(sums, num_queries * head_dim / kLanes);
    grow(totals, num_queries);
    grow(maxima, num_queries);
  }

  template <class Element>
  static void grow(std::vector<Element>& vector, int64_t size) {
    if (static_cast<int64_t>(vector.size()) < size) vector.resize(size);
  }
};

template <class T>
class Attention {
 public:
  Attention(const Call<T>& call, const Item& item, Scratch& scratch)
      : call_(call),
        item_(item),
        group_(call.group()),
        num_queries_(item.num_tokens * group_),
        first_seen_(std::max<int64_t>(0, item.first_position - call.sliding_window + 1)),
        scratch_(scratch) {
    scratch_.reserve(num_queries_, call.head_dim);
  }

  void run() {
    const int64_t first_tile = first_seen_ / kTileKeys, end_tile = (item_.end_position() - 1) / kTileKeys + 1;
    const int64_t num_tiles = end_tile - first_tile, count = num_tiles * item_.num_heads;
    Tile<T> tiles[2];
    locate(item_.first_head, first_tile, tiles[0]);
    for (int64_t i = 0; i < count; ++i) {
      const Tile<T>& tile = tiles[i % 2];
      Tile<T>& next = tiles[(i + 1) % 2];
      if (i + 1 < count) locate(item_.first_head + (i + 1) / num_tiles, first_tile + (i + 1) % num_tiles, next);
      if (i % num_tiles == 0) begin_head(tile.kv_head);
      attend(tile, i + 1 < count ? &next : nullptr);
      if ((i + 1) % num_tiles == 0) end_head(tile.kv_head);
    }
  }

 private:
  using Word = typename Operand<T>::Word;
  using Element = typename Operand<T>::Element;

  void locate(int64_t kv_head, int64_t index, Tile<T>& tile) const {
    tile.kv_head = kv_head;
    tile.start = index * kTileKeys;
    const int32_t* blocks = call_.block_tables + item_.row * call_.block_table_stride;
    const T* zeros = reinterpret_cast<const T*>(scratch_.zeros.data());
    int64_t block = tile.start / call_.block_size, slot = tile.start % call_.block_size;
    for (int i = 0; i < kTileKeys; ++i) {
      const int64_t position = tile.start + i;
      const bool is_seen = position >= first_seen_ && position < item_.end_position();
      const int64_t offset = (kv_head * call_.block_size + slot) * call_.head_dim;
      tile.keys[i] = is_seen ? call_.key_cache + blocks[block] * call_.key_block_stride + offset : zeros;
      tile.values[i] = is_seen ? call_.value_cache + blocks[block] * call_.value_block_stride + offset : zeros;
      if (++slot == call_.block_size) ++block, slot = 0;
    }
  }

  void begin_head(int64_t kv_head) {
    Element* queries = reinterpret_cast<Element*>(scratch_.queries.data());
    for (int64_t q = 0; q < num_queries_; ++q) {
      const T* query = call_.query + (item_.first_token + q / group_) * call_.query_token_stride +
                       (kv_head * group_ + q % group_) * call_.query_head_stride;
      for (int64_t dim = 0; dim < call_.head_dim; dim += kLanes, queries += kLanes) store(queries, load(query + dim));
    }
    std::fill_n(scratch_.sums.begin(), num_queries_ * call_.head_dim / kLanes, Floats{});
    std::fill_n(scratch_.totals.begin(), num_queries_, Floats{});
    std::fill_n(scratch_.maxima.begin(), num_queries_, -INFINITY);
  }

  void end_head(int64_t kv_head) {
    const Floats* sums = scratch_.sums.data();
    for (int64_t q = 0; q < num_queries_; ++q) {
      const int64_t token = item_.first_token + q / group_, head = kv_head * group_ + q % group_;
      T* out = call_.out + (token * call_.num_heads + head) * call_.head_dim;
      const Floats total = broadcast(sum(scratch_.totals[q]));
      for (int64_t dim = 0; dim < call_.head_dim; dim += kLanes) store(out + dim, *sums++ / total);
    }
  }

  // The queries that see some of the tile's keys take them in. Others must not be touched: adding zeros is not always exact.
  void attend(const Tile<T>& tile, const Tile<T>* next) {
    const int64_t first_token = std::max<int64_t>(0, tile.start - item_.first_position);
    const int64_t end_token =
        std::min(item_.num_tokens, tile.start + kTileKeys - 1 + call_.sliding_window - item_.first_position);
    const int vectors = vectors_below(item_.end_position() - tile.start);
    pack_keys(tile.keys, next ? next->keys : nullptr, call_.head_dim, vectors, scratch_.keys.data());
    pack_values(tile.values, next ? next->values : nullptr, call_.head_dim, vectors * kLanes, scratch_.values.data());
    for (int64_t query = first_token * group_; query < end_token * group_; query += kRowBlock) {
      attend_block(tile, query, static_cast<int>(std::min<int64_t>(kRowBlock, end_token * group_ - query)));
    }
  }

  // Vectors that hold the tile's first `num_keys` keys.
  static int vectors_below(int64_t num_keys) {
    return static_cast<int>((std::min<int64_t>(num_keys, kTileKeys) + kLanes - 1) / kLanes);
  }

  void attend_block(const Tile<T>& tile, int64_t query, int num_queries) {
    const int64_t steps = call_.head_dim / kPerWord<T>, dim_vectors = call_.head_dim / kLanes;
    const int vectors = vectors_below(position(query + num_queries - 1) + 1 - tile.start);
    Floats* scores = scratch_.scores.data();
    std::fill_n(scores, kRowBlock * kTileVectors, Floats{});
    const Word* queries = reinterpret_cast<const Word*>(scratch_.queries.data()) + query * steps;
    multiply(Product<Word>{queries, steps, scratch_.keys.data(), kTileVectors, steps, scores, kTileVectors}, num_queries,
             vectors);
    for (int i = 0; i < num_queries; ++i) weigh(tile, query + i, vectors, i);
    constexpr int64_t kWeightWords = kTileKeys / kPerWord<T>;
    const Word* weights = reinterpret_cast<const Word*>(scratch_.weights.data());
    multiply(Product<Word>{weights, kWeightWords, scratch_.values.data(), dim_vectors, vectors * kLanes / kPerWord<T>,
                           scratch_.sums.data() + query * dim_vectors, dim_vectors},
             num_queries, dim_vectors);
  }

  int64_t position(int64_t query) const { return item_.first_position + query / group_; }

  // Turns the scores of one query (at `index` of its block) into weights e^(score - maximum), and brings what it has summed
  // up so far to the new maximum.
  void weigh(const Tile<T>& tile, int64_t query, int vectors, int index) {
    Floats scores[kTileVectors];
    Floats best = broadcast(-INFINITY);
    for (int v = 0; v < vectors; ++v) {
      scores[v] = final_score(scratch_.scores[index * kTileVectors + v], tile, query, v * kLanes);
      best = maximum(best, scores[v]);
    }
    float& maximum_so_far = scratch_.maxima[query];
    const float tile_maximum = largest(best);
    if (tile_maximum > maximum_so_far) {
      rescale(query, maximum_so_far - tile_maximum);
      maximum_so_far = tile_maximum;
    }
    Element* weights = reinterpret_cast<Element*>(scratch_.weights.data()) + index * kTileKeys;
    Floats total = scratch_.totals[query];
    for (int v = 0; v < vectors; ++v) {
      const Floats difference = scores[v] - maximum_so_far;
      const Floats power = exponential(difference);
      const Floats weight = difference == difference ? power : difference;  // a NaN stays one
      store(weights + v * kLanes, weight);
      total = total + weight;
    }
    scratch_.totals[query] = total;
  }

  // The scores of kLanes keys from `first_key` of the tile on: scaled, capped, biased; -infinity where the query does not see it.
  Floats final_score(Floats product, const Tile<T>& tile, int64_t query, int first_key) const {
    Ints distances;
    for (int lane = 0; lane < kLanes; ++lane) distances[lane] = lane;
    const int64_t distance = tile.start + first_key - position(query);  // of the first key
    Floats score = product * call_.scale;
    if (call_.soft_cap != 0) score = call_.soft_cap * hyperbolic_tangent(score / call_.soft_cap);
    distances += static_cast<int32_t>(distance);
    if (call_.alibi_slopes != nullptr) {
      const int64_t head = tile.kv_head * group_ + query % group_;
      score = multiply_add(broadcast(call_.alibi_slopes[head]), __builtin_convertvector(distances, Floats), score);
    }
    if (distance + kLanes > 1) score = distances > 0 ? broadcast(-INFINITY) : score;
    if (distance <= -call_.sliding_window) {
      score = distances <= -static_cast<int32_t>(call_.sliding_window) ? broadcast(-INFINITY) : score;
    }
    return score;
  }

  void rescale(int64_t query, float exponent) {
    const Floats factor = exponential(broadcast(exponent));
    const int64_t dim_vectors = call_.head_dim / kLanes;
    Floats* sums = scratch_.sums.data() + query * dim_vectors;
    for (int64_t v = 0; v < dim_vectors; ++v) sums[v] = sums[v] * factor;
    scratch_.totals[query] = scratch_.totals[query] * factor;
  }

  const Call<T>& call_;
  const Item& item_;
  const int64_t group_, num_queries_, first_seen_;
  Scratch& scratch_;
};

// Cuts the rows into items, costly ones first, so that no thread begins one when the others are about to finish. Decodes take
// as many KV heads together as leaves every thread eight items: consecutive tiles are fetched ahead within an item only.
template <class T>
void cut(const Call<T>& call, std::vector<Item>& items) {
  items.clear();
  const int64_t item_tokens = std::max<int64_t>(1, kItemQueries / call.group());
  const int64_t num_pairs = call.num_rows * call.num_kv_heads;
  const int64_t decode_heads = std::clamp<int64_t>(num_pairs / (8 * num_threads()), 1, call.num_kv_heads);
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t start = call.query_start_loc[row], end = call.query_start_loc[row + 1];
    const int64_t heads_together = end - start == 1 ? decode_heads : 1;
    for (int64_t head = 0; head < call.num_kv_heads; head += heads_together) {
      const int64_t num_heads = std::min(heads_together, call.num_kv_heads - head);
      for (int64_t token = start; token < end; token += item_tokens) {
        const int64_t num_tokens = std::min(item_tokens, end - token);
        items.push_back({row, token, call.seq_lens[row] - (end - token), num_tokens, head, num_heads});
      }
    }
  }
  if (num_threads() == 1) return;
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost() > b.cost(); });
}

template <class T>
void run(const Call<T>& call) {
  thread_local std::vector<Item> items;
  cut(call, items);
  const Item* first = items.data();
  for_each_chunk(static_cast<int64_t>(items.size()), [&, first](int64_t index) {
    thread_local Scratch scratch;
    Attention<T>(call, first[index], scratch).run();
  });
}

}  // namespace
}  // namespace llmstack

// Arguments as in `Call`, in its order; the integers are 64 bits wide, the tables' entries 32.
#define LLMSTACK_PAGED_ATTENTION(suffix, T)                                                                               \
  extern "C" void llmstack_paged_attention_##suffix(                                                                      \
      T* out, const T* query, int64_t query_token_stride, int64_t query_head_stride, const T* key_cache,                  \
      const T* value_cache, int64_t key_block_stride, int64_t value_block_stride, const int32_t* query_start_loc,         \
      const int32_t* seq_lens, const int32_t* block_tables, int64_t block_table_stride, const float* alibi_slopes,        \
      int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,       \
      float soft_cap, int64_t sliding_window) {                                                                           \
    llmstack::run(llmstack::Call<T>{out, query, query_token_stride, query_head_stride, key_cache, value_cache,            \
                                    key_block_stride, value_block_stride, query_start_loc, seq_lens, block_tables,        \
                                    block_table_stride, alibi_slopes, num_rows, num_heads, num_kv_heads, head_dim,        \
                                    block_size, scale, soft_cap, sliding_window});                                        \
  }                                                                                                                       \
  LLMSTACK_REPEATABLE(paged_attention_##suffix)

LLMSTACK_PAGED_ATTENTION(f32, float)
LLMSTACK_PAGED_ATTENTION(bf16, llmstack::BFloat16)
LLMSTACK_PAGED_ATTENTION(f16, llmstack::Float16)
