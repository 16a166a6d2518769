// Attention over keys and values in blocks, for decodes and prefill chunks alike.
//
// A context is cut into tiles at multiples of 64 positions. A tile serves all queries of an item of work: several tokens
// and the heads that share the KV head. For many of them its keys and values are laid out for multiplication once; a decode
// reads them as they lie (`decode.h`). Softmax is taken tile after tile with a running maximum. Since the tiles do not move,
// a token's result depends on its own context only: it is bit-equal alone and in any batch, decoded and prefilled, in one
// chunk or many.

#include <algorithm>
#include <vector>

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/threads.h"
#include "decode.h"

namespace llmstack {
namespace {

// Queries in an item of a prefill: enough to repay the packing of tiles (48 and 192 measured slower).
constexpr int64_t kItemQueries = 96;

// At most so many queries of a KV head read a tile as it lies: with more of them, packing it pays.
constexpr int64_t kUnpackedQueries = 8;

// Eight bytes a field, in the order of `_ARGUMENTS` in native.py.
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
  const float* sinks;         // [num_heads] or null: scores without a value
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size;
  int64_t sliding_window;  // none: more than any context has
  double scale, soft_cap;  // no cap: 0

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

// Addresses of a tile's keys and values. Positions that the item does not see point to zeros: their slots may hold anything.
template <class T>
struct Tile {
  int64_t head, start;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  Stretch key_stretches[kTileKeys + 1], value_stretches[kTileKeys + 1];  // block by block
};

// Softmax of one query so far: what was summed up is relative to the largest score.
struct Query {
  int64_t position;
  float slope;  // 0 without ALiBi
  float largest_score;
  Floats total;  // of the weights, lane by lane
};

// A thread's memory, kept between calls.
struct Scratch {
  std::vector<Words> operands, keys, values, weights, zeros;
  std::vector<Floats> scores, sums;
  std::vector<Query> queries;
  float factors[kRowBlock + kLanes] = {};  // whole vectors of them

  void reserve(int64_t num_queries, int64_t head_dim) {
    grow(operands, num_queries * head_dim / kLanes);
    grow(keys, kTileVectors * head_dim);
    grow(values, kTileKeys * head_dim / kLanes);
    grow(weights, kRowBlock * kTileVectors);
    grow(zeros, head_dim / kLanes);
    grow(scores, kRowBlock * kTileVectors);
    grow(sums, num_queries * head_dim / kLanes);
    grow(queries, num_queries);
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
        soft_cap_(static_cast<float>(call.soft_cap)),
        has_bias_(call.soft_cap != 0 || call.alibi_slopes != nullptr || !(call.scale > 0)),
        product_scale_(static_cast<float>(call.scale)),
        scale_(has_bias_ ? 1.0f : product_scale_),
        scratch_(scratch) {
    scratch_.reserve(num_queries_ * item.num_heads, call.head_dim);
  }

  // Heads within tiles, as they lie in the blocks: memory is then read in long pieces.
  void run() {
    begin();
    const int64_t first_tile = first_seen_ / kTileKeys, end_tile = (item_.end_position() - 1) / kTileKeys + 1;
    const int64_t count = (end_tile - first_tile) * item_.num_heads;
    Tile<T> tiles[2];
    locate(0, first_tile, tiles[0]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t next = i + 1;
      if (next < count) locate(next % item_.num_heads, first_tile + next / item_.num_heads, tiles[next % 2]);
      attend(tiles[i % 2], next < count ? &tiles[next % 2] : nullptr);
    }
    end();
  }

 private:
  using Word = typename Operand<T>::Word;
  using Element = typename Operand<T>::Element;

  // `head` counts from the item's first one.
  void locate(int64_t head, int64_t index, Tile<T>& tile) const {
    tile.head = head;
    tile.start = index * kTileKeys;
    const T* zeros = reinterpret_cast<const T*>(scratch_.zeros.data());
    const int first = static_cast<int>(std::max<int64_t>(first_seen_ - tile.start, 0));
    const int end = static_cast<int>(std::min<int64_t>(item_.end_position() - tile.start, kTileKeys));
    std::fill(tile.keys, tile.keys + first, zeros);
    std::fill(tile.values, tile.values + first, zeros);
    std::fill(tile.keys + end, tile.keys + kTileKeys, zeros);
    std::fill(tile.values + end, tile.values + kTileKeys, zeros);
    const int32_t* blocks = call_.block_tables + item_.row * call_.block_table_stride;
    int64_t block = (tile.start + first) / call_.block_size, slot = (tile.start + first) % call_.block_size;
    Stretch *key_stretch = tile.key_stretches, *value_stretch = tile.value_stretches;
    for (int i = first; i < end; ++block, slot = 0) {
      const int block_end = static_cast<int>(std::min<int64_t>(end, i + call_.block_size - slot));
      const int64_t offset = ((item_.first_head + head) * call_.block_size + slot) * call_.head_dim;
      const T* key = call_.key_cache + blocks[block] * call_.key_block_stride + offset;
      const T* value = call_.value_cache + blocks[block] * call_.value_block_stride + offset;
      const int64_t num_bytes = (block_end - i) * call_.head_dim * sizeof(T);
      *key_stretch++ = {reinterpret_cast<const char*>(key), reinterpret_cast<const char*>(key) + num_bytes};
      *value_stretch++ = {reinterpret_cast<const char*>(value), reinterpret_cast<const char*>(value) + num_bytes};
      for (; i < block_end; ++i, key += call_.head_dim, value += call_.head_dim) {
        tile.keys[i] = key;
        tile.values[i] = value;
      }
    }
    *key_stretch = *value_stretch = {};
  }

  // Queries are numbered KV head by KV head, token by token, query head by query head.
  template <class Work>
  void for_each_query(const Work& work) const {
    int64_t query = 0;
    for (int64_t kv_head = item_.first_head; kv_head < item_.first_head + item_.num_heads; ++kv_head) {
      for (int64_t token = 0; token < item_.num_tokens; ++token) {
        for (int64_t i = 0; i < group_; ++i) work(query++, token, kv_head * group_ + i);
      }
    }
  }

  // The queries of neighbouring tokens lie far apart, so all are fetched before the first is waited for.
  void begin() {
    const int64_t head_dim = call_.head_dim;
    const auto query_of = [&](int64_t token, int64_t head) {
      return call_.query + (item_.first_token + token) * call_.query_token_stride + head * call_.query_head_stride;
    };
    for_each_query([&](int64_t, int64_t token, int64_t head) {
      const char* start = reinterpret_cast<const char*>(query_of(token, head));
      for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(start + byte);
    });
    for_each_query([&](int64_t query, int64_t token, int64_t head) {
      const T* source = query_of(token, head);
      Element* operands = reinterpret_cast<Element*>(scratch_.operands.data()) + query * head_dim;
      for (int64_t dim = 0; dim < head_dim; dim += kLanes) store(operands + dim, load(source + dim));
      const float slope = call_.alibi_slopes == nullptr ? 0.0f : call_.alibi_slopes[head];
      Query& state = scratch_.queries[query] = {item_.first_position + token, slope, -INFINITY, Floats{}};
      if (call_.sinks != nullptr) {  // the largest score so far, with the weight e^0
        state.largest_score = call_.sinks[head];
        state.total[0] = 1.0f;
      }
      std::fill_n(scratch_.sums.begin() + query * head_dim / kLanes, head_dim / kLanes, Floats{});
    });
  }

  void end() {
    const int64_t head_dim = call_.head_dim;
    for_each_query([&](int64_t query, int64_t token, int64_t head) {
      Floats* sums = scratch_.sums.data() + query * head_dim / kLanes;
      to_natural_order<T>(sums, head_dim);
      const float scale = 1.0f / sum(scratch_.queries[query].total);
      T* out = call_.out + ((item_.first_token + token) * call_.num_heads + head) * head_dim;
      for (int64_t dim = 0; dim < head_dim; dim += kLanes) store(out + dim, *sums++ * scale);
    });
  }

  // Adds a tile for the queries that see some of its keys, and prefetches the next one. Other queries are skipped: without
  // a visible key there is no largest score.
  void attend(const Tile<T>& tile, const Tile<T>* next) {
    const int64_t first_token = std::max<int64_t>(0, tile.start - item_.first_position);
    const int64_t end_token =
        std::min(item_.num_tokens, tile.start + kTileKeys - 1 + call_.sliding_window - item_.first_position);
    const int vectors = vectors_below(item_.end_position() - tile.start);
    Prefetches prefetches;
    prefetches.near_values = Fetch(tile.value_stretches);
    if (next != nullptr) {
      prefetches.keys = prefetches.near_keys = Fetch(next->key_stretches);
      prefetches.values = Fetch(next->value_stretches);
    }
    const int64_t base = tile.head * num_queries_, end = base + end_token * group_;
    if (num_queries_ <= kUnpackedQueries) {
      for (int64_t query = base + first_token * group_; query < end; query += kDecodeRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kDecodeRows, end - query));
        score(operands(query), tile.keys, call_.head_dim, rows, vectors, scratch_.scores.data(), prefetches);
        const float* factors = weigh_block(tile, query, rows, vectors);
        add_values(weights(), tile.values, call_.head_dim, rows, vectors * kLanes, factors, sums(query), prefetches);
      }
      return;
    }
    pack_keys(tile.keys, call_.head_dim, vectors, scratch_.keys.data(), prefetches.values);
    pack_values(tile.values, call_.head_dim, vectors * kLanes, scratch_.values.data(), prefetches.values);
    for (int64_t query = base + first_token * group_; query < end; query += kRowBlock) {
      attend_block(tile, query, static_cast<int>(std::min<int64_t>(kRowBlock, end - query)), prefetches.keys);
    }
  }

  const Word* operands(int64_t query) const {
    return reinterpret_cast<const Word*>(scratch_.operands.data()) + query * (call_.head_dim / kPerWord<T>);
  }
  const Word* weights() const { return reinterpret_cast<const Word*>(scratch_.weights.data()); }
  Floats* sums(int64_t query) const { return scratch_.sums.data() + query * (call_.head_dim / kLanes); }

  // Vectors that hold the tile's first `num_keys` keys.
  static int vectors_below(int64_t num_keys) {
    return static_cast<int>((std::min<int64_t>(num_keys, kTileKeys) + kLanes - 1) / kLanes);
  }

  void attend_block(const Tile<T>& tile, int64_t query, int num_queries, Fetch& fetch) {
    const int64_t steps = call_.head_dim / kPerWord<T>, dim_vectors = call_.head_dim / kLanes;
    const int vectors = vectors_below(scratch_.queries[query + num_queries - 1].position + 1 - tile.start);
    multiply(Product<Word>{operands(query), steps, scratch_.keys.data(), kTileVectors, steps, scratch_.scores.data(),
                           kTileVectors, nullptr},
             num_queries, vectors, fetch);
    const float* factors = weigh_block(tile, query, num_queries, vectors);
    multiply(Product<Word>{weights(), kTileKeys / kPerWord<T>, scratch_.values.data(), dim_vectors,
                           vectors * kLanes / kPerWord<T>, sums(query), dim_vectors, factors},
             num_queries, dim_vectors, fetch);
  }

  // Turns the products of some queries into weights. Returns what is to be multiplied with what they have summed up before,
  // to be relative to the same score.
  const float* weigh_block(const Tile<T>& tile, int64_t query, int num_queries, int vectors) {
    Query* queries = &scratch_.queries[query];
    float* factors = scratch_.factors;
    for (int i = 0; i < num_queries; ++i) {
      const float before = queries[i].largest_score;
      find_largest(scratch_.scores.data() + i * kTileVectors, vectors, tile.start, queries[i]);
      factors[i] = before - queries[i].largest_score;
    }
    for (int i = 0; i < num_queries; i += kLanes) store(factors + i, exponential_below_1(load(factors + i)));
    if (vectors == kTileVectors) {
      weigh<true>(queries, num_queries, vectors);
    } else {
      weigh<false>(queries, num_queries, vectors);
    }
    return factors;
  }

  // Sees to it that `query.largest_score` is that of these products, too.
  void find_largest(Floats* products, int vectors, int64_t tile_start, Query& query) const {
    const int64_t distance = tile_start - query.position;  // from the query to the tile's first key
    if (has_bias_) bias(products, vectors, distance, query.slope);
    if (distance + vectors * kLanes > 1 || distance <= -call_.sliding_window) hide(products, vectors, distance);
    Floats best = products[0];
    for (int v = 1; v < vectors; ++v) best = maximum(best, products[v]);
    query.largest_score = std::max(query.largest_score, largest(best) * scale_);
  }

  // Weights e^(score - largest score), and their totals. (In a pass of its own, in which no query waits for another.)
  template <bool kIsWhole>
  void weigh(Query* queries, int num_queries, int some_vectors) {
    const int vectors = kIsWhole ? kTileVectors : some_vectors;
    const Floats* products = scratch_.scores.data();
    Element* weights = reinterpret_cast<Element*>(scratch_.weights.data());
    const Floats scale = broadcast(scale_);
    for (int i = 0; i < num_queries; ++i, products += kTileVectors, weights += kTileKeys) {
      const Floats negated = broadcast(-queries[i].largest_score);
      Floats total = queries[i].total * scratch_.factors[i];
      for (int v = 0; v < vectors; ++v) {
        const Floats weight = exponential_below_1(multiply_add(products[v], scale, negated));
        store(weights + v * kLanes, weight);
        total += weight;
      }
      queries[i].total = total;
    }
  }

  // Distances from a query to the keys of vector `v`, given that to the tile's first key.
  static Ints distances(int64_t distance, int v) {
    Ints lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    return lanes + static_cast<int32_t>(distance + v * kLanes);
  }

  void bias(Floats* scores, int vectors, int64_t distance, float slope) const {
    for (int v = 0; v < vectors; ++v) {
      scores[v] = scores[v] * product_scale_;
      if (soft_cap_ != 0) scores[v] = soft_cap_ * hyperbolic_tangent(scores[v] / soft_cap_);
      scores[v] = multiply_add(broadcast(slope), __builtin_convertvector(distances(distance, v), Floats), scores[v]);
    }
  }

  // Keys that the query does not see count nothing.
  void hide(Floats* scores, int vectors, int64_t distance) const {
    const int32_t nearest_hidden = -static_cast<int32_t>(call_.sliding_window);
    for (int v = 0; v < vectors; ++v) {
      const Ints from_query = distances(distance, v);
      scores[v] = from_query > 0 || from_query <= nearest_hidden ? broadcast(-INFINITY) : scores[v];
    }
  }

  const Call<T>& call_;
  const Item& item_;
  const int64_t group_;
  const int64_t num_queries_;  // of one KV head
  const int64_t first_seen_;   // position
  const float soft_cap_;
  const bool has_bias_;         // products become scores before the largest is found
  const float product_scale_;   // by which products become scores
  const float scale_;           // what remains to be multiplied when the largest is found; positive
  Scratch& scratch_;
};

// Cuts the rows into items, costly ones first, so that no thread begins one when the others are about to finish.
// Decodes take as many KV heads together as leaves every thread two items: neighbouring heads are one stretch of memory.
template <class T>
void cut(const Call<T>& call, std::vector<Item>& items) {
  items.clear();
  const int64_t item_tokens = std::max<int64_t>(1, kItemQueries / call.group());
  const int64_t num_pairs = call.num_rows * call.num_kv_heads;
  const int64_t decode_heads = std::clamp<int64_t>(num_pairs / (2 * num_threads()), 1, call.num_kv_heads);
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

extern "C" void llmstack_paged_attention_f32(const llmstack::Call<llmstack::Float32>* call) { llmstack::run(*call); }
extern "C" void llmstack_paged_attention_bf16(const llmstack::Call<llmstack::BFloat16>* call) { llmstack::run(*call); }
extern "C" void llmstack_paged_attention_f16(const llmstack::Call<llmstack::Float16>* call) { llmstack::run(*call); }
LLMSTACK_REPEATABLE(paged_attention_f32)
LLMSTACK_REPEATABLE(paged_attention_bf16)
LLMSTACK_REPEATABLE(paged_attention_f16)
