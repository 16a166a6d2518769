// Attention over keys and values in blocks, for decodes and prefill chunks alike.
//
// A context is cut into tiles at multiples of 64 positions. A tile serves all queries of an item of work: several tokens
// and the heads that share the KV head. For many of them its keys and values are laid out for multiplication once; a decode
// reads values, and of few heads keys, as they lie (`decode.h`). Decodes whose contexts begin with the same blocks read those once (`items.h`). Softmax
// is taken tile after tile with a running maximum. Since the tiles do not move,
// a token's result depends on its own context only: it is bit-equal alone and in any batch, decoded and prefilled, in one
// chunk or many.

#include <algorithm>
#include <utility>
#include <vector>

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/threads.h"
#include "decode.h"
#include "items.h"
#include "weights.h"

namespace llmstack {
namespace {

// At most so many queries of a KV head read values as they lie: with more of them, packing a whole tile pays.
constexpr int64_t kUnpackedQueries = 8;
static_assert(kUnpackedQueries <= 2 * kRowBlock);

// Blocks of queries whose weights are computed together: no product then waits for the largest score of the one before.
constexpr int kBlocksTogether = 4;
constexpr int kQueriesTogether = kBlocksTogether * kRowBlock;

// Queries that are fetched before they are copied. More at once exceed a processor's queue.
constexpr int64_t kQueriesAhead = 12;

// Addresses of a tile's keys and values. Positions that the item does not see point to zeros: their slots may hold anything.
template <class T>
struct Tile {
  Place place;
  int64_t start;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  Stretch key_stretches[kTileKeys + 1], value_stretches[kTileKeys + 1];  // block by block
};

// Softmax of one query so far: what was summed up is relative to the largest score.
struct Query {
  int64_t position;
  float slope;  // 0 without ALiBi
  float largest_score;  // to base 2
  Floats total;  // of the weights, lane by lane
};

// A thread's memory, kept between calls.
struct Scratch {
  std::vector<Words> operands, keys, values, weights, zeros;
  std::vector<Floats> scores, sums;
  std::vector<Query> queries;
  float factors[kQueriesTogether + kLanes] = {};  // whole vectors of them

  void reserve(int64_t num_queries, int64_t head_dim, int64_t value_dim) {
    grow(operands, num_queries * head_dim / kLanes);
    grow(keys, kTileVectors * head_dim);
    grow(values, kTileKeys * value_dim / kLanes);
    grow(weights, kQueriesTogether * kTileVectors);
    grow(zeros, std::max(head_dim, value_dim) / kLanes);
    grow(scores, kQueriesTogether * kTileVectors);
    grow(sums, num_queries * value_dim / kLanes);
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
        group_(item.group),
        num_queries_(item.num_tokens * group_),
        first_seen_(item.num_rows > 1 ? 0 : std::max<int64_t>(0, item.first_position - call.sliding_window + 1)),
        soft_cap_(static_cast<float>(call.soft_cap)),
        has_bias_(call.soft_cap != 0 || call.alibi_slopes != nullptr || !(call.scale > 0)),
        product_scale_(static_cast<float>(call.scale)),
        scale_(static_cast<float>(has_bias_ ? kLog2E : call.scale * kLog2E)),
        scratch_(scratch) {
    scratch_.reserve(num_queries_ * item.num_heads, call.head_dim, call.value_dim);
  }

  // Heads within tiles, as they lie in the blocks: memory is then read in long pieces.
  void run() {
    begin();
    Place place = item_.num_rows > 1 ? Place{kAllRows, 0, 0} : Place{0, first_seen_ / kTileKeys, 0};
    Tile<T> tiles[2];
    locate(place, tiles[0]);
    for (int i = 0, is_left = 1; is_left; i = 1 - i) {
      is_left = advance(place);
      if (is_left) locate(place, tiles[1 - i]);
      attend(tiles[i], is_left ? &tiles[1 - i] : nullptr);
    }
    end();
  }

 private:
  using Word = typename Operand<T>::Word;
  using Element = typename Operand<T>::Element;

  // The first position after those that the tiles of a member hold.
  int64_t end_position(int64_t member) const {
    if (member == kAllRows) return item_.num_shared_tiles * kTileKeys;
    return item_.num_rows > 1 ? call_.seq_lens[item_.rows[member]] : item_.first_position + item_.num_tokens;
  }

  // The tiles of all rows come first, then each row's own. False after the last one.
  bool advance(Place& place) const {
    if (++place.head < item_.num_heads) return true;
    place.head = 0;
    ++place.tile;
    while (place.tile * kTileKeys >= end_position(place.member)) {
      if (++place.member == item_.num_rows) return false;
      place.tile = item_.num_shared_tiles;
    }
    return true;
  }

  void locate(const Place& place, Tile<T>& tile) const {
    tile.place = place;
    tile.start = place.tile * kTileKeys;
    const T* zeros = reinterpret_cast<const T*>(scratch_.zeros.data());
    const int first = static_cast<int>(std::max<int64_t>(first_seen_ - tile.start, 0));
    const int end = static_cast<int>(std::min<int64_t>(end_position(place.member) - tile.start, kTileKeys));
    std::fill(tile.keys, tile.keys + first, zeros);
    std::fill(tile.values, tile.values + first, zeros);
    std::fill(tile.keys + end, tile.keys + kTileKeys, zeros);
    std::fill(tile.values + end, tile.values + kTileKeys, zeros);
    const int32_t* blocks = call_.blocks_of(item_.rows[std::max<int64_t>(place.member, 0)]);
    int64_t block = (tile.start + first) / call_.block_size, slot = (tile.start + first) % call_.block_size;
    Stretch *key_stretch = tile.key_stretches, *value_stretch = tile.value_stretches;
    for (int i = first; i < end; ++block, slot = 0) {
      const int block_end = static_cast<int>(std::min<int64_t>(end, i + call_.block_size - slot));
      const int64_t place_of = (item_.first_head + place.head) * call_.block_size + slot, count = block_end - i;
      const T* key = call_.key_cache + blocks[block] * call_.key_block_stride + place_of * call_.head_dim;
      const T* value = call_.value_cache + blocks[block] * call_.value_block_stride + place_of * call_.value_stride;
      *key_stretch++ = stretch_of(key, count * call_.head_dim);
      if (key != value) *value_stretch++ = stretch_of(value, count * call_.value_stride);
      for (int next = 0; next < count; ++next) tile.keys[i + next] = key + next * call_.head_dim;
      for (int next = 0; next < count; ++next) tile.values[i + next] = value + next * call_.value_stride;
      i = block_end;
    }
    *key_stretch = *value_stretch = {};
  }

  static Stretch stretch_of(const T* first, int64_t count) {
    return {reinterpret_cast<const char*>(first), reinterpret_cast<const char*>(first + count)};
  }

  // Among all the rows' tokens, and in its context.
  int64_t token_of(int64_t index) const {
    return item_.num_rows > 1 ? call_.query_start_loc[item_.rows[index]] : item_.first_token + index;
  }
  int64_t position_of(int64_t index) const {
    return item_.num_rows > 1 ? call_.seq_lens[item_.rows[index]] - 1 : item_.first_position + index;
  }

  int64_t first_head_of(int64_t kv_head) const { return kv_head * call_.group() + item_.first_query; }

  // Queries are numbered KV head by KV head, token by token, query head by query head.
  template <class Work>
  void for_each_query(const Work& work) const {
    int64_t query = 0;
    for (int64_t kv_head = item_.first_head; kv_head < item_.first_head + item_.num_heads; ++kv_head) {
      for (int64_t token = 0; token < item_.num_tokens; ++token) {
        for (int64_t i = 0; i < group_; ++i) work(query++, token, first_head_of(kv_head) + i);
      }
    }
  }

  // The queries of neighbouring tokens lie far apart, so they are fetched before they are waited for.
  void begin() {
    const int64_t head_dim = call_.head_dim, head_bytes = head_dim * sizeof(T);
    const auto query_of = [&](int64_t token, int64_t head) {
      return call_.query + token_of(token) * call_.query_token_stride + head * call_.query_head_stride;
    };
    const auto fetch = [&](int64_t token, int64_t head) {
      const char* start = reinterpret_cast<const char*>(query_of(token, head));
      for (int64_t byte = 0; byte < head_bytes; byte += 64) __builtin_prefetch(start + byte);
    };
    const int64_t tokens_ahead = std::min(item_.num_tokens, (kQueriesAhead + group_ - 1) / group_);
    for (int64_t token = 0; token < tokens_ahead; ++token) {
      for (int64_t i = 0; i < group_; ++i) fetch(token, first_head_of(item_.first_head) + i);
    }
    for_each_query([&](int64_t query, int64_t token, int64_t head) {
      if (token + tokens_ahead < item_.num_tokens) fetch(token + tokens_ahead, head);
      const T* source = query_of(token, head);
      Element* operands = reinterpret_cast<Element*>(scratch_.operands.data()) + query * head_dim;
      for (int64_t dim = 0; dim < head_dim; dim += kLanes) store(operands + dim, load(source + dim));
      const float slope = call_.alibi_slopes == nullptr ? 0.0f : call_.alibi_slopes[head];
      Query& state = scratch_.queries[query] = {position_of(token), slope, -INFINITY, Floats{}};
      if (call_.sinks != nullptr) {  // the largest score so far, with the weight e^0
        state.largest_score = call_.sinks[head] * static_cast<float>(kLog2E);
        state.total[0] = 1.0f;
      }
      std::fill_n(sums(query), call_.value_dim / kLanes, Floats{});
    });
  }

  void end() {
    const int64_t value_dim = call_.value_dim;
    for_each_query([&](int64_t query, int64_t token, int64_t head) {
      Floats* sums = this->sums(query);
      to_natural_order<T>(sums, value_dim);
      const float scale = 1.0f / sum(scratch_.queries[query].total);
      T* out = call_.out + (token_of(token) * call_.num_heads + head) * value_dim;
      for (int64_t dim = 0; dim < value_dim; dim += kLanes) store(out + dim, *sums++ * scale);
    });
  }

  // The first of the item's tokens that sees keys of the tile, and the end of these tokens.
  std::pair<int64_t, int64_t> tokens_that_see(const Tile<T>& tile) const {
    const int64_t member = tile.place.member;
    if (member == kAllRows) return {0, item_.num_tokens};
    if (item_.num_rows > 1) return {member, member + 1};
    return {std::max<int64_t>(0, tile.start - item_.first_position),
            std::min(item_.num_tokens, tile.start + kTileKeys - 1 + call_.sliding_window - item_.first_position)};
  }

  // Adds a tile for the queries that see some of its keys, and prefetches the next one. Other queries are skipped: without
  // a visible key there is no largest score.
  void attend(const Tile<T>& tile, const Tile<T>* next) {
    const auto [first_token, end_token] = tokens_that_see(tile);
    const int vectors = vectors_below(end_position(tile.place.member) - tile.start);
    const int64_t base = tile.place.head * num_queries_, first = base + first_token * group_;
    const int64_t end = base + end_token * group_;
    if ((item_.num_rows > 1 ? end - first : num_queries_) <= kUnpackedQueries) {
      if constexpr (kHasFewRegisters) {
        if (call_.head_dim * static_cast<int64_t>(sizeof(T)) <= TurnFetch::kMostRowBytes) {
          return attend_few<TurnFetch>(tile, next, first, static_cast<int>(end - first), vectors);
        }
      }
      return attend_few<OrderedFetch>(tile, next, first, static_cast<int>(end - first), vectors);
    }
    Fetch next_keys, next_values;
    if (next != nullptr) next_keys = Fetch(next->key_stretches), next_values = Fetch(next->value_stretches);
    pack_keys(tile.keys, call_.head_dim, vectors, scratch_.keys.data(), next_values);
    pack_values(tile.values, call_.value_dim, vectors * kLanes, scratch_.values.data(), next_values);
    for (int64_t query = first; query < end; query += kQueriesTogether) {
      attend_packed(tile, query, static_cast<int>(std::min<int64_t>(kQueriesTogether, end - query)), next_keys);
    }
  }

  // The same for few queries, which multiply keys and values as they lie.
  template <class TileFetch>
  void attend_few(const Tile<T>& tile, const Tile<T>* next, int64_t first, int rows, int vectors) {
    const int of_both[2] = {vectors, vectors};  // blocks of kRowBlock
    TileFetch fetch(tile.values, call_.value_dim, next == nullptr ? nullptr : next->key_stretches, tile.value_stretches);
    score(operands(first), tile.keys, call_.head_dim, rows, vectors, scratch_.scores.data(), scratch_.keys.data(), fetch);
    const float* factors = weigh_all(tile, first, rows, of_both);
    fetch = next == nullptr ? TileFetch()
                            : TileFetch(next->keys, call_.head_dim, next->value_stretches, next->key_stretches);
    add_values(weights(), tile.values, call_.value_dim, rows, vectors * kLanes, factors, sums(first), fetch);
  }

  const Word* operands(int64_t query) const {
    return reinterpret_cast<const Word*>(scratch_.operands.data()) + query * (call_.head_dim / kPerWord<T>);
  }
  const Word* weights() const { return reinterpret_cast<const Word*>(scratch_.weights.data()); }
  Floats* sums(int64_t query) const { return scratch_.sums.data() + query * (call_.value_dim / kLanes); }

  // Vectors that hold the tile's first `num_keys` keys.
  static int vectors_below(int64_t num_keys) {
    return static_cast<int>((std::min<int64_t>(num_keys, kTileKeys) + kLanes - 1) / kLanes);
  }

  // The same with the packed tile, for queries together.
  void attend_packed(const Tile<T>& tile, int64_t query, int num_queries, Fetch& fetch) {
    const int64_t steps = call_.head_dim / kPerWord<T>, dim_vectors = call_.value_dim / kLanes;
    int vectors[kBlocksTogether];
    const auto for_each_block = [&](const auto& work) {
      for (int first = 0, block = 0; first < num_queries; first += kRowBlock, ++block) {
        work(first, std::min(kRowBlock, num_queries - first), vectors[block]);
      }
    };
    for_each_block([&](int first, int count, int& own) {
      own = vectors_below(scratch_.queries[query + first + count - 1].position + 1 - tile.start);
      Floats* scores = scratch_.scores.data() + first * kTileVectors;
      multiply(Product<Word>{operands(query + first), steps, scratch_.keys.data(), kTileVectors, steps, scores,
                             kTileVectors, nullptr},
               count, own, fetch);
    });
    const float* factors = weigh_all(tile, query, num_queries, vectors);
    for_each_block([&](int first, int count, int own) {
      constexpr int64_t kWeightStride = kTileKeys / kPerWord<T>;
      multiply(Product<Word>{weights() + first * kWeightStride, kWeightStride, scratch_.values.data(), dim_vectors,
                             own * kLanes / kPerWord<T>, sums(query + first), dim_vectors, factors + first},
               count, dim_vectors, fetch);
    });
  }

  // Turns the products of some queries into weights; `vectors` has those of each kRowBlock queries. Returns what is to be
  // multiplied with what they have summed up before, to be relative to the same score.
  const float* weigh_all(const Tile<T>& tile, int64_t query, int num_queries, const int* vectors) {
    Query* queries = &scratch_.queries[query];
    float* factors = scratch_.factors;
    for (int i = 0; i < num_queries; ++i) {
      const int own = vectors[i / kRowBlock];
      const float before = queries[i].largest_score;
      Floats* products = scratch_.scores.data() + i * kTileVectors;
      own == kTileVectors ? find_largest<true>(products, own, tile.start, queries[i])
                          : find_largest<false>(products, own, tile.start, queries[i]);
      factors[i] = before - queries[i].largest_score;
    }
    for (int i = 0; i < num_queries; i += kLanes) store(factors + i, power_of_2_below_1(load(factors + i)));
    for (int i = 0; i < num_queries; ++i) {
      const int own = vectors[i / kRowBlock];
      own == kTileVectors ? weigh<true>(queries[i], i, own) : weigh<false>(queries[i], i, own);
    }
    return factors;
  }

  // Sees to it that `query.largest_score` is that of these products, too.
  template <bool kIsWhole>
  void find_largest(Floats* products, int some_vectors, int64_t tile_start, Query& query) const {
    const int vectors = kIsWhole ? kTileVectors : some_vectors;
    const int64_t distance = tile_start - query.position;  // from the query to the tile's first key
    if (has_bias_) bias(products, vectors, distance, query.slope);
    if (distance + vectors * kLanes > 1 || distance <= -call_.sliding_window) hide(products, vectors, distance);
    query.largest_score = std::max(query.largest_score, largest_of<kIsWhole>(products, vectors) * scale_);
  }

  // Weights 2^(score - largest score) of query `i` of those together, and their total.
  template <bool kIsWhole>
  void weigh(Query& query, int i, int some_vectors) {
    const Floats* products = scratch_.scores.data() + i * kTileVectors;
    Element* weights = reinterpret_cast<Element*>(scratch_.weights.data()) + i * kTileKeys;
    query.total = store_weights<kIsWhole>(products, some_vectors, scale_, query.largest_score,
                                          query.total * scratch_.factors[i], weights);
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
  const float scale_;           // by which products or biased ones become scores to base 2; positive
  Scratch& scratch_;
};

template <class T>
void run(const Call<T>& call) {
  thread_local Items items;
  cut(call, items);
  const Item* first = items.items.data();
  for_each_chunk(static_cast<int64_t>(items.items.size()), [&, first](int64_t index) {
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
