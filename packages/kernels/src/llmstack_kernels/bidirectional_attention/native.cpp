// Attention without a cache or order: each query attends to all keys of its own row.
//
// The keys of a row are cut into tiles, at multiples of 64 from its first one. Threads share out items, a head and some
// neighbouring queries each. A tile's keys and values are laid out for multiplication once per item, as in
// `paged_attention`, whose products these are. Softmax is taken tile after tile with a running maximum. Since tiles do not
// move, a query's result depends on its own row alone: neither on what else is in the call, nor on the cut into items.

#include <algorithm>
#include <vector>

#include "../native/cuts.h"
#include "../native/repeat.h"
#include "../native/threads.h"
#include "../paged_attention/operands.h"
#include "../paged_attention/weights.h"

namespace llmstack {
namespace {

// At most so many queries are an item: enough to repay the packing of tiles. More repay it better (5 % of the time of a row
// of 1,500), where threads have so many items that they still end at about the same time, as far as the second-level cache holds
// operands and sums.
constexpr int64_t kRowItemQueries = 96, kManyRowItemQueries = 384;
constexpr int64_t kManyRowItems = 4;  // per thread

// Queries whose weights are computed together: no product then waits for the largest score of the one before.
constexpr int kRowQueriesTogether = 8 * kRowBlock;

// Eight bytes a field, in the order of `_ARGUMENTS` in native.py.
template <class T>
struct RowsCall {
  T* out;                         // [num_queries, num_heads, head_dim]
  const T *query, *key, *value;   // [..., num_heads, head_dim], strided
  int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t first_query, num_queries;  // among the tokens of all rows
  int64_t num_heads, head_dim;
  int64_t num_rows;
  double scale;       // above 0
  int64_t starts[1];  // [num_rows + 1]: the first token of each row, and their end
};

struct RowsItem {
  int64_t row_start, row_end, first, count, head;  // tokens
};

// What heads are filled up to a multiple of: whole vectors of values, and whole parts of keys.
template <class T>
constexpr int64_t kDimStep = std::max<int64_t>(kLanes, kPartBytes / sizeof(T));

// Addresses of a tile's keys and values, which point to zeros behind the end of the row.
template <class T>
struct RowTile {
  const T *keys[kTileKeys], *values[kTileKeys];
  Stretch stretches[2 * kTileKeys + 1];  // of both, one after the other
};

// A thread's memory, kept between calls.
struct RowsScratch {
  std::vector<Words> operands, keys, values, weights, staged;
  std::vector<Floats> scores, sums, totals;
  std::vector<float> largest_scores, factors;

  void reserve(int64_t num_queries, int64_t dim) {
    grow(operands, num_queries * dim / kLanes);
    grow(keys, kTileVectors * dim);
    grow(values, kTileKeys * dim / kLanes);
    grow(weights, kRowQueriesTogether * kTileVectors);
    grow(staged, (2 * kTileKeys + 1) * dim / kLanes);  // and zeros
    grow(scores, kRowQueriesTogether * kTileVectors);
    grow(sums, num_queries * dim / kLanes);
    grow(totals, num_queries);
    grow(largest_scores, num_queries);
    grow(factors, kRowQueriesTogether + kLanes);  // whole vectors of them
  }

  template <class Element>
  static void grow(std::vector<Element>& vector, int64_t size) {
    if (static_cast<int64_t>(vector.size()) < size) vector.resize(size);
  }
};

template <class T>
class RowsAttention {
 public:
  RowsAttention(const RowsCall<T>& call, const RowsItem& item, RowsScratch& scratch)
      : call_(call),
        item_(item),
        dim_((call.head_dim + kDimStep<T> - 1) / kDimStep<T> * kDimStep<T>),
        vectors_(dim_ / kLanes),
        scale_(static_cast<float>(call.scale * kLog2E)),
        scratch_(scratch) {
    scratch_.reserve(item.count, dim_);
    std::fill_n(zeros(), dim_, T{});
  }

  void run() {
    begin();
    RowTile<T> tiles[2];
    locate(item_.row_start, tiles[0]);
    int i = 0;
    for (int64_t start = item_.row_start; start < item_.row_end; start += kTileKeys, i = 1 - i) {
      const bool is_last = start + kTileKeys >= item_.row_end;
      if (!is_last) locate(start + kTileKeys, tiles[1 - i]);
      Fetch fetch = is_last ? Fetch() : Fetch(tiles[1 - i].stretches);
      attend(tiles[i], static_cast<int>(std::min<int64_t>(kTileKeys, item_.row_end - start)), fetch);
    }
    end();
  }

 private:
  using Word = typename Operand<T>::Word;
  using Element = typename Operand<T>::Element;

  // Heads of another size than `dim_` are copied, with zeros behind.
  bool is_staged() const { return dim_ != call_.head_dim; }
  T* staged() const { return reinterpret_cast<T*>(scratch_.staged.data()); }
  T* zeros() const { return staged() + 2 * kTileKeys * dim_; }

  const Word* operands(int64_t query) const {
    return reinterpret_cast<const Word*>(scratch_.operands.data()) + query * (dim_ / kPerWord<T>);
  }
  Element* weights(int64_t query) const {
    return reinterpret_cast<Element*>(scratch_.weights.data()) + query * kTileKeys;
  }
  Floats* scores(int64_t query) const { return scratch_.scores.data() + query * kTileVectors; }
  Floats* sums(int64_t query) const { return scratch_.sums.data() + query * vectors_; }

  void begin() {
    const T* source = call_.query + (item_.first - call_.first_query) * call_.query_token_stride +
                      item_.head * call_.query_head_stride;
    Element* target = reinterpret_cast<Element*>(scratch_.operands.data());
    for (int64_t query = 0; query < item_.count; ++query, source += call_.query_token_stride, target += dim_) {
      for (int64_t dim = 0; dim < dim_; dim += kLanes) {
        const int64_t left = call_.head_dim - dim;
        store(target + dim, left >= kLanes ? load(source + dim)
                                           : load_first(source + dim, static_cast<int>(std::max<int64_t>(left, 0))));
      }
    }
    std::fill_n(scratch_.largest_scores.data(), item_.count, -INFINITY);
    std::fill_n(scratch_.totals.data(), item_.count, Floats{});
    std::fill_n(scratch_.sums.data(), item_.count * vectors_, Floats{});
  }

  void end() {
    T* out = call_.out + ((item_.first - call_.first_query) * call_.num_heads + item_.head) * call_.head_dim;
    for (int64_t query = 0; query < item_.count; ++query, out += call_.num_heads * call_.head_dim) {
      Floats* sums = this->sums(query);
      to_natural_order<T>(sums, dim_);
      const float factor = 1.0f / sum(scratch_.totals[query]);
      int64_t dim = 0;
      for (; dim + kLanes <= call_.head_dim; dim += kLanes) store(out + dim, *sums++ * factor);
      if (dim < call_.head_dim) store_first(out + dim, *sums * factor, static_cast<int>(call_.head_dim - dim));
    }
  }

  void locate(int64_t start, RowTile<T>& tile) const {
    const int count = static_cast<int>(std::min<int64_t>(kTileKeys, item_.row_end - start));
    const T* key = call_.key + start * call_.key_token_stride + item_.head * call_.key_head_stride;
    const T* value = call_.value + start * call_.value_token_stride + item_.head * call_.value_head_stride;
    Stretch* stretch = tile.stretches;
    for (int i = 0; i < count; ++i, key += call_.key_token_stride, value += call_.value_token_stride) {
      tile.keys[i] = key;
      tile.values[i] = value;
      for (const T* head : {key, value}) {
        *stretch++ = {reinterpret_cast<const char*>(head), reinterpret_cast<const char*>(head + call_.head_dim)};
      }
    }
    *stretch = {};
    std::fill(tile.keys + count, tile.keys + kTileKeys, zeros());
    std::fill(tile.values + count, tile.values + kTileKeys, zeros());
  }

  void stage(const T** rows, int count, T* target) const {
    for (int i = 0; i < count; ++i, target += dim_) {
      std::copy_n(rows[i], call_.head_dim, target);
      std::fill(target + call_.head_dim, target + dim_, T{});
      rows[i] = target;
    }
  }

  void attend(RowTile<T>& tile, int num_keys, Fetch& fetch) {
    const int vectors = (num_keys + kLanes - 1) / kLanes;
    Fetch none;
    if (is_staged()) {
      stage(tile.keys, num_keys, staged());
      stage(tile.values, num_keys, staged() + kTileKeys * dim_);
    }
    pack_keys(tile.keys, dim_, vectors, scratch_.keys.data(), none);
    pack_values(tile.values, dim_, vectors * kLanes, scratch_.values.data(), none);
    for (int64_t query = 0; query < item_.count; query += kRowQueriesTogether) {
      const int count = static_cast<int>(std::min<int64_t>(kRowQueriesTogether, item_.count - query));
      num_keys == kTileKeys ? attend_together<true>(query, count, num_keys, vectors, fetch)
                            : attend_together<false>(query, count, num_keys, vectors, fetch);
    }
  }

  template <bool kIsWhole>
  void attend_together(int64_t query, int num_queries, int num_keys, int vectors, Fetch& fetch) {
    constexpr int64_t kWeightStride = kTileKeys / kPerWord<T>;
    const int64_t steps = (call_.head_dim + kPerWord<T> - 1) / kPerWord<T>, stride = dim_ / kPerWord<T>;
    for (int first = 0; first < num_queries; first += kRowBlock) {
      multiply(Product<Word>{operands(query + first), stride, scratch_.keys.data(), kTileVectors, steps, scores(first),
                             kTileVectors, nullptr},
               std::min(kRowBlock, num_queries - first), vectors, fetch);
    }
    weigh<kIsWhole>(query, num_queries, num_keys, vectors);
    for (int first = 0; first < num_queries; first += kRowBlock) {
      multiply(Product<Word>{reinterpret_cast<const Word*>(weights(first)), kWeightStride, scratch_.values.data(),
                             vectors_, vectors * kLanes / kPerWord<T>, sums(query + first), vectors_,
                             scratch_.factors.data() + first},
               std::min(kRowBlock, num_queries - first), vectors_, fetch);
    }
  }

  // Turns products into weights, and finds what the sums so far are to be multiplied with, to be relative to the same
  // score.
  template <bool kIsWhole>
  void weigh(int64_t query, int num_queries, int num_keys, int vectors) {
    float *factors = scratch_.factors.data(), *largest_scores = &scratch_.largest_scores[query];
    for (int i = 0; i < num_queries; ++i) {
      if (!kIsWhole) hide(scores(i), num_keys);
      const float before = largest_scores[i];
      largest_scores[i] = std::max(before, largest_of<kIsWhole>(scores(i), vectors) * scale_);
      factors[i] = before - largest_scores[i];
    }
    for (int i = 0; i < num_queries; i += kLanes) store(factors + i, power_of_2_below_1(load(factors + i)));
    for (int i = 0; i < num_queries; ++i) {
      Floats& total = scratch_.totals[query + i];
      total = store_weights<kIsWhole>(scores(i), vectors, scale_, largest_scores[i], total * factors[i], weights(i));
    }
  }

  // What is behind the end of the row counts nothing.
  static void hide(Floats* scores, int num_keys) {
    float* lanes = reinterpret_cast<float*>(scores);
    for (int key = num_keys; key % kLanes != 0; ++key) lanes[key] = -INFINITY;
  }

  const RowsCall<T>& call_;
  const RowsItem& item_;
  const int64_t dim_;      // of a head, with what fills its last vector
  const int64_t vectors_;  // of a head
  const float scale_;
  RowsScratch& scratch_;
};

template <class T>
void cut_rows(const RowsCall<T>& call, std::vector<RowsItem>& items) {
  const bool are_many = call.num_queries * call.num_heads >= kManyRowItemQueries * kManyRowItems * num_threads();
  const int64_t fitting = cuts.item / (2 * call.head_dim * static_cast<int64_t>(sizeof(float)));
  const int64_t most = are_many || num_threads() == 1 ? std::clamp(fitting, kRowItemQueries, kManyRowItemQueries)
                                                      : kRowItemQueries;
  const int64_t end_query = call.first_query + call.num_queries;
  items.clear();
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t start = call.starts[row], end = call.starts[row + 1];
    const int64_t first = std::max(start, call.first_query), num_queries = std::min(end, end_query) - first;
    const int64_t parts = num_queries <= 0 ? 0 : (num_queries + most - 1) / most;
    for (int64_t head = 0; head < call.num_heads; ++head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * num_queries / parts;
        items.push_back({start, end, first + begin, (part + 1) * num_queries / parts - begin, head});
      }
    }
  }
}

template <class T>
void attend_rows(const RowsCall<T>& call) {
  thread_local std::vector<RowsItem> items;
  cut_rows(call, items);
  const RowsItem* first = items.data();
  for_each_chunk(static_cast<int64_t>(items.size()), [&, first](int64_t index) {
    thread_local RowsScratch scratch;
    RowsAttention<T>(call, first[index], scratch).run();
  });
}

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_bidirectional_attention_f32(const llmstack::RowsCall<llmstack::Float32>* call) {
  llmstack::attend_rows(*call);
}
extern "C" void llmstack_bidirectional_attention_bf16(const llmstack::RowsCall<llmstack::BFloat16>* call) {
  llmstack::attend_rows(*call);
}
extern "C" void llmstack_bidirectional_attention_f16(const llmstack::RowsCall<llmstack::Float16>* call) {
  llmstack::attend_rows(*call);
}
LLMSTACK_REPEATABLE(bidirectional_attention_f32)
LLMSTACK_REPEATABLE(bidirectional_attention_bf16)
LLMSTACK_REPEATABLE(bidirectional_attention_f16)
