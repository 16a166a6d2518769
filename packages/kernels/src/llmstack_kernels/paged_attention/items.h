// Attention of a batch as items of work for threads.
//
// An item is a run of neighbouring tokens of one row. Or it is decodes of several rows whose contexts begin with the same
// blocks, as behind a shared prefix: their tiles are read once for all of these rows, and each row's own tiles follow. A
// query meets the same tiles in the same order either way, so its result has the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../native/cuts.h"
#include "../native/threads.h"
#include "operands.h"

namespace llmstack {
namespace {

// Queries in an item of a prefill: enough to repay the packing of tiles. More repay it better, where threads have so many
// items that they still end at about the same time, as far as the second-level cache holds operands and sums.
constexpr int64_t kItemQueries = 96, kManyItemQueries = 192;
constexpr int64_t kManyItems = 8;  // per thread
constexpr int64_t kPartQueries = 8;  // at least, of a KV head that several items share

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
  int64_t value_dim, value_stride;  // numbers of a value, and from one to the next: those of a key where it begins with it
  int64_t sliding_window;  // none: more than any context has
  double scale, soft_cap;  // no cap: 0

  int64_t group() const { return num_heads / num_kv_heads; }
  const int32_t* blocks_of(int64_t row) const { return block_tables + row * block_table_stride; }
};

// Tokens with the query heads of some KV heads.
struct Item {
  const int32_t* rows;
  int64_t num_rows;          // more than one: decodes, a token of each
  int64_t num_shared_tiles;  // tiles that are the same in all of several rows
  int64_t first_token;       // of one row: in all the rows' tokens
  int64_t first_position;    // of one row: that token's, in the context
  int64_t num_tokens;
  int64_t first_head, num_heads;  // KV heads
  int64_t first_query, group;     // query heads of each of them, counted from its first one
  int64_t cost;                   // in about the time of a key and a KV head
};

// Where an item is: a tile of the context, and a KV head, which counts from the item's first one.
struct Place {
  int64_t member;  // the row that has the tile
  int64_t tile, head;
};
constexpr int64_t kAllRows = -1;  // as a member

// Decodes that read tiles together.
struct Run {
  const int32_t* rows;
  int64_t num_rows, num_tiles, num_keys;
};

struct Items {
  std::vector<Item> items;
  std::vector<Run> runs;
  std::vector<int32_t> decodes, others;  // rows
};

// Tiles of a row without hidden keys.
template <class T>
int64_t num_whole_tiles(const Call<T>& call, int64_t row) {
  return call.seq_lens[row] / kTileKeys;
}

// Whole tiles with which the contexts of two rows begin, both of them.
template <class T>
int64_t num_common_tiles(const Call<T>& call, int64_t row, int64_t other) {
  const int64_t limit = std::min(num_whole_tiles(call, row), num_whole_tiles(call, other));
  const int64_t num_blocks = (limit * kTileKeys + call.block_size - 1) / call.block_size;
  const int32_t *blocks = call.blocks_of(row), *others = call.blocks_of(other);
  const int64_t common = std::mismatch(blocks, blocks + num_blocks, others).first - blocks;
  return std::min(limit, common * call.block_size / kTileKeys);
}

// Brings decodes with common blocks together. Sorted, each row's longest common beginning is with a neighbour.
template <class T>
void sort_by_blocks(const Call<T>& call, std::vector<int32_t>& rows) {
  const auto end_of = [&](int32_t row) {
    return call.blocks_of(row) + (num_whole_tiles(call, row) * kTileKeys + call.block_size - 1) / call.block_size;
  };
  std::sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) {
    const int32_t *of_a = call.blocks_of(a), *of_b = call.blocks_of(b);
    const int32_t *end_a = end_of(a), *end_b = end_of(b);
    while (of_a < end_a && of_b < end_b && *of_a == *of_b) ++of_a, ++of_b;
    if (of_a == end_a || of_b == end_b) return of_a == end_a && (of_b < end_b || a < b);
    return *of_a < *of_b;
  });
}

// How many of the sorted rows from `first` on read tiles together, and how many tiles: another row joins where no fewer
// reads are saved with it.
template <class T>
int64_t count_together(const Call<T>& call, const std::vector<int32_t>& rows, int64_t first, int64_t& num_tiles) {
  const int64_t limit = std::min<int64_t>(rows.size() - first, kItemQueries / call.group());
  int64_t count = 1;
  num_tiles = 0;
  for (; count < limit; ++count) {
    const int64_t common = num_common_tiles(call, rows[first + count - 1], rows[first + count]);
    const int64_t with_it = count > 1 ? std::min(num_tiles, common) : common;
    if (with_it * count == 0 || with_it * count < num_tiles * (count - 1)) break;
    num_tiles = with_it;
  }
  return count;
}

// Queries in an item of these rows.
template <class T>
int64_t num_item_queries(const Call<T>& call, const std::vector<int32_t>& rows) {
  int64_t num_tokens = 0;
  for (const int32_t row : rows) num_tokens += call.query_start_loc[row + 1] - call.query_start_loc[row];
  const bool are_many = num_tokens * call.num_heads >= kManyItemQueries * kManyItems * num_threads();
  const int64_t query_bytes = (call.head_dim + call.value_dim) * static_cast<int64_t>(sizeof(float));
  return are_many ? std::clamp(cuts.item / query_bytes, kItemQueries, kManyItemQueries) : kItemQueries;
}

// Items of neighbouring tokens of one row, a KV head each.
template <class T>
void cut_row(const Call<T>& call, const int32_t* row, int64_t num_queries, std::vector<Item>& items) {
  const int64_t item_tokens = std::max<int64_t>(1, num_queries / call.group());
  const int64_t start = call.query_start_loc[*row], end = call.query_start_loc[*row + 1];
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    for (int64_t token = start; token < end; token += item_tokens) {
      const int64_t num_tokens = std::min(item_tokens, end - token);
      const int64_t position = call.seq_lens[*row] - (end - token);
      const int64_t cost = num_tokens * (position + num_tokens);
      items.push_back({row, 1, 0, token, position, num_tokens, head, 1, 0, call.group(), cost});
    }
  }
}

// Parts of each KV head's query heads, where there are fewer runs of decodes and KV heads than threads, as of one latent:
// every part reads the tiles, which caches of several threads share.
template <class T>
int64_t num_group_parts(const Call<T>& call, int64_t num_runs) {
  if (num_runs * call.num_kv_heads == 0) return 1;
  return std::clamp<int64_t>(num_threads() / (num_runs * call.num_kv_heads), 1,
                             std::max<int64_t>(1, call.group() / kPartQueries));
}

// Items of decodes: `rows` sorted, those with common blocks together where `is_shared`. As many KV heads together as leave
// every thread two items: neighbouring heads are one stretch of memory.
template <class T>
void cut_decodes(const Call<T>& call, const std::vector<int32_t>& rows, bool is_shared, Items& cut) {
  cut.runs.clear();
  int64_t total = 0, num_tiles = 0;
  for (int64_t first = 0, count = 1; first < static_cast<int64_t>(rows.size()); first += count) {
    if (is_shared) count = count_together(call, rows, first, num_tiles);
    int64_t num_keys = num_tiles * kTileKeys * (count > 1 ? 2 + count / 8 : 0);  // packed, then multiplied
    for (int64_t i = first; i < first + count; ++i) num_keys += call.seq_lens[rows[i]] - num_tiles * kTileKeys;
    cut.runs.push_back({rows.data() + first, count, num_tiles, num_keys});
    total += num_keys;
  }
  const int64_t item_keys = total * call.num_kv_heads / (2 * num_threads());
  const int64_t parts = num_group_parts(call, static_cast<int64_t>(cut.runs.size()));
  for (const auto& [first, count, shared_tiles, num_keys] : cut.runs) {
    const int64_t most = std::clamp<int64_t>(item_keys / std::max<int64_t>(1, num_keys), 1, call.num_kv_heads);
    const int64_t token = call.query_start_loc[*first], position = call.seq_lens[*first] - 1;
    for (int64_t head = 0; head < call.num_kv_heads; head += most) {
      const int64_t num_heads = std::min(most, call.num_kv_heads - head);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t query = part * call.group() / parts, end = (part + 1) * call.group() / parts;
        cut.items.push_back({first, count, shared_tiles, token, position, count, head, num_heads, query, end - query,
                             num_heads * num_keys});
      }
    }
  }
}

// Cuts the rows into items, costly ones first, so that no thread begins one when the others are about to finish.
template <class T>
void cut(const Call<T>& call, Items& cut) {
  auto& [items, runs, decodes, others] = cut;
  items.clear();
  decodes.clear();
  others.clear();
  bool has_window = false;
  for (int32_t row = 0; row < call.num_rows; ++row) {
    has_window |= call.seq_lens[row] > call.sliding_window;
    (call.query_start_loc[row + 1] - call.query_start_loc[row] == 1 ? decodes : others).push_back(row);
  }
  const int64_t num_queries = num_item_queries(call, others);
  for (const int32_t& row : others) cut_row(call, &row, num_queries, items);
  if (!has_window) sort_by_blocks(call, decodes);
  cut_decodes(call, decodes, !has_window, cut);
  if (num_threads() == 1) return;
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

}  // namespace
}  // namespace llmstack
