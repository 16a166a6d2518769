// Low-rank updates of the outputs of a linear layer: y += (x A) B, with an A and a B of its own for each tile of rows.
// In an embedding x has one 1, at the row's id.
//
// Each number of x A is one sum over the inputs, a lane at a time in ascending order and the lanes in a fixed tree; each
// output is one sum over the rank in ascending order. Neither depends on the rows beside it.

#include "../native/elementwise.h"
#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr int kLowRankRows = 4;  // most rows of a tile
constexpr int kLowRankParts = 4;  // most pairs of factors of a layer, such as those of q, k and v
constexpr int64_t kLowRankPanel = 32;  // outputs of a panel of B: `PANEL_SIZE` of slots.py
constexpr int64_t kLowRankColumns = 512;  // outputs that a thread takes at once, where tiles are few
constexpr int64_t kLowRankAheadBytes = 8192;  // what is prefetched before it is read

// The factors of one part, as words of 64 bits.
struct LowRankPart {
  int64_t a, b;  // addresses of [rank, in_features] and [panels, rank, kLowRankPanel]; 0 where there are none
  int64_t rank, first_output, num_outputs;
};

template <class T, class Out>
struct LowRankCall {
  const T* x;  // [num_rows, in_features], rows `x_stride` apart
  int64_t x_stride, in_features;
  Out* y;  // [num_rows, out_features]
  int64_t out_features;
  const LowRankPart* parts;  // [num_slots][kLowRankParts], slots `slot_stride` words apart
  int64_t slot_stride;
  const int32_t* rows;   // rows in the order of their slots
  const int32_t* tiles;  // [num_tiles][3]: slot, first place in `rows`, number of rows
  float* reduced;        // [places][kLowRankParts][max_rank]
  int64_t max_rank;

  const LowRankPart& part(int64_t tile, int64_t index) const {
    const int64_t* slot = reinterpret_cast<const int64_t*>(parts) + tiles[3 * tile] * slot_stride;
    return reinterpret_cast<const LowRankPart*>(slot)[index];
  }
  float* reduced_at(int64_t place, int64_t index) const {
    return reduced + (place * kLowRankParts + index) * max_rank;
  }
};

// Prefetches a tile's factors in the order in which they are read, and then the beginning of those of the thread's next
// tile. An adapter's factors of one layer lie together. Factors that every step reads once come from memory.
class LowRankAhead {
 public:
  LowRankAhead() = default;
  template <class T, class Out>
  LowRankAhead(const LowRankCall<T, Out>& call, int64_t tile, int64_t next_tile) {
    for (int64_t index = 0; index < kLowRankParts; ++index) {
      const LowRankPart& part = call.part(tile, index);
      if (!part.a) continue;
      if (at_ == nullptr) at_ = reinterpret_cast<const char*>(part.a) + kLowRankAheadBytes;
      const int64_t panels = (part.num_outputs + kLowRankPanel - 1) / kLowRankPanel;
      end_ = reinterpret_cast<const char*>(part.b) + panels * part.rank * kLowRankPanel * sizeof(T);
    }
    if (next_tile >= 0) next_ = reinterpret_cast<const char*>(call.part(next_tile, 0).a);
  }

  template <int kLines>
  void next() {
    if (at_ >= end_) {
      if (next_ == nullptr) return;
      at_ = next_, end_ = next_ + kLowRankAheadBytes, next_ = nullptr;
    }
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + 64 * line, 0, 2);
    at_ += 64 * kLines;
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr, *next_ = nullptr;
};

// Lines of the cache that so many elements take.
template <class T>
constexpr int kLowRankLines(int64_t count) {
  return count * sizeof(T) > 64 ? static_cast<int>(count * sizeof(T) / 64) : 1;
}

template <int kRows, int kRanks, class T>
inline void low_rank_dots(const T* const* x, const T* a, int64_t in_features, float* const* out, int64_t rank,
                          LowRankAhead& shared_ahead) {
  Floats sums[kRows][kRanks] = {};
  LowRankAhead ahead = shared_ahead;  // in registers
  for_each_vector(in_features, [&](int64_t i, int n) {
    ahead.next<kLowRankLines<T>(kRanks * kLanes)>();
    Floats inputs[kRows];
    for (int r = 0; r < kRows; ++r) inputs[r] = load_some(x[r] + i, n);
    for (int j = 0; j < kRanks; ++j) {
      const Floats factors = load_some(a + j * in_features + i, n);
      for (int r = 0; r < kRows; ++r) sums[r][j] = multiply_add(inputs[r], factors, sums[r][j]);
    }
  });
  shared_ahead = ahead;
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kRanks; ++j) out[r][rank + j] = sum(sums[r][j]);
  }
}

template <int kRows, class T, class Out>
void low_rank_reduce(const LowRankCall<T, Out>& call, int64_t tile, int64_t index, LowRankAhead& ahead) {
  const LowRankPart& part = call.part(tile, index);
  const T* x[kRows];
  float* out[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t place = call.tiles[3 * tile + 1] + r;
    x[r] = call.x + call.rows[place] * call.x_stride;
    out[r] = call.reduced_at(place, index);
  }
  const T* a = reinterpret_cast<const T*>(part.a);
  int64_t rank = 0;
  for (; rank + 4 <= part.rank; rank += 4) {
    low_rank_dots<kRows, 4>(x, a + rank * call.in_features, call.in_features, out, rank, ahead);
  }
  for (; rank < part.rank; ++rank) {
    low_rank_dots<kRows, 1>(x, a + rank * call.in_features, call.in_features, out, rank, ahead);
  }
}

// Adds the outputs that two vectors of a panel belong to; only the first `width` of them exist.
template <int kRows, class T, class Out>
inline void low_rank_columns(const T* panel, int64_t rank, const float* const* reduced, Out* const* y, int64_t width,
                             LowRankAhead& shared_ahead) {
  Floats sums[kRows][2] = {};
  LowRankAhead ahead = shared_ahead;
  for (int64_t i = 0; i < rank; ++i) {
    ahead.next<kLowRankLines<T>(2 * kLanes)>();
    const Floats factors[2] = {load(panel + i * kLowRankPanel), load(panel + i * kLowRankPanel + kLanes)};
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 2; ++v) sums[r][v] = multiply_add(broadcast(reduced[r][i]), factors[v], sums[r][v]);
    }
  }
  shared_ahead = ahead;
  if (width >= 2 * kLanes) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 2; ++v) store(y[r] + v * kLanes, load(y[r] + v * kLanes) + sums[r][v]);
    }
    return;
  }
  Floats some[kRows][2];  // a copy, so that `sums` stay in registers
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) some[r][v] = sums[r][v];
  }
  for (int r = 0; r < kRows; ++r) {
    for_each_vector(width, [&](int64_t i, int n) {
      store_some(y[r] + i, load_some(y[r] + i, n) + some[r][i / kLanes], n);
    });
  }
}

// The panels of a tile's rows that begin within the outputs [first, end).
template <int kRows, class T, class Out>
void low_rank_expand(const LowRankCall<T, Out>& call, int64_t tile, int64_t first, int64_t end, LowRankAhead& ahead) {
  static_assert(kLowRankPanel % (2 * kLanes) == 0, "panels are computed two vectors at a time");
  const auto panels_before = [](int64_t outputs) {
    return outputs > 0 ? (outputs + kLowRankPanel - 1) / kLowRankPanel : 0;
  };
  for (int64_t index = 0; index < kLowRankParts; ++index) {
    const LowRankPart& part = call.part(tile, index);
    if (!part.a) continue;
    const float* reduced[kRows];
    for (int r = 0; r < kRows; ++r) reduced[r] = call.reduced_at(call.tiles[3 * tile + 1] + r, index);
    const int64_t rest = end - part.first_output;
    const int64_t last = panels_before(rest < part.num_outputs ? rest : part.num_outputs);
    for (int64_t panel = panels_before(first - part.first_output); panel < last; ++panel) {
      const T* b = reinterpret_cast<const T*>(part.b) + panel * part.rank * kLowRankPanel;
      for (int64_t lane = 0; lane < kLowRankPanel; lane += 2 * kLanes) {
        const int64_t column = panel * kLowRankPanel + lane;
        if (column >= part.num_outputs) break;
        Out* y[kRows];
        for (int r = 0; r < kRows; ++r) {
          const int64_t row = call.rows[call.tiles[3 * tile + 1] + r];
          y[r] = call.y + row * call.out_features + part.first_output + column;
        }
        low_rank_columns<kRows>(b + lane, part.rank, reduced, y, part.num_outputs - column, ahead);
      }
    }
  }
}

// Calls `work(std::integral_constant<int, number of rows>)` for a tile.
template <class Work>
inline void with_low_rank_rows(int32_t num_rows, const Work& work) {
  switch (num_rows) {
    case 4: work(std::integral_constant<int, 4>{}); break;
    case 3: work(std::integral_constant<int, 3>{}); break;
    case 2: work(std::integral_constant<int, 2>{}); break;
    case 1: work(std::integral_constant<int, 1>{}); break;
  }
}

// `reduce(tile, part, ahead)` computes the numbers between the factors. Where tiles are many, a thread takes a whole one, so
// that it reads factors in one piece.
template <class T, class Out, class Reduce>
void low_rank_update(const LowRankCall<T, Out>& call, int64_t num_tiles, const Reduce& reduce) {
  const auto expand = [&](int64_t tile, int64_t first, int64_t end, LowRankAhead& ahead) {
    with_low_rank_rows(call.tiles[3 * tile + 2], [&](auto rows) {
      low_rank_expand<decltype(rows)::value>(call, tile, first, end, ahead);
    });
  };
  const int64_t threads = num_threads();
  if (num_tiles >= 2 * threads || threads == 1) {
    for_each_chunk(num_tiles, [&](int64_t tile) {
      LowRankAhead ahead(call, tile, tile + threads < num_tiles ? tile + threads : -1);
      for (int64_t index = 0; index < kLowRankParts; ++index) {
        if (call.part(tile, index).a) reduce(tile, index, ahead);
      }
      expand(tile, 0, call.out_features, ahead);
    });
    return;
  }
  for_each_chunk(num_tiles * kLowRankParts, [&](int64_t chunk) {
    const int64_t tile = chunk / kLowRankParts, index = chunk % kLowRankParts;
    LowRankAhead none;
    if (call.part(tile, index).a) reduce(tile, index, none);
  });
  const int64_t blocks = (call.out_features + kLowRankColumns - 1) / kLowRankColumns;
  for_each_chunk(num_tiles * blocks, [&](int64_t chunk) {
    const int64_t first = chunk % blocks * kLowRankColumns;
    LowRankAhead none;
    expand(chunk / blocks, first, first + kLowRankColumns, none);
  });
}

template <class T, class Out>
void low_rank_add(const LowRankCall<T, Out>& call, int64_t num_tiles) {
  low_rank_update(call, num_tiles, [&](int64_t tile, int64_t index, LowRankAhead& ahead) {
    with_low_rank_rows(call.tiles[3 * tile + 2], [&](auto rows) {
      low_rank_reduce<decltype(rows)::value>(call, tile, index, ahead);
    });
  });
}

template <class T>
void low_rank_add_to_embedding(const LowRankCall<T, T>& call, const int64_t* ids, int64_t num_tiles) {
  low_rank_update(call, num_tiles, [&](int64_t tile, int64_t index, LowRankAhead&) {
    const LowRankPart& part = call.part(tile, index);
    const T* a = reinterpret_cast<const T*>(part.a);
    const int32_t* bounds = call.tiles + 3 * tile;
    for (int64_t place = bounds[1]; place < bounds[1] + bounds[2]; ++place) {
      const T* column = a + ids[call.rows[place]];
      float* out = call.reduced_at(place, index);
      for (int64_t rank = 0; rank < part.rank; ++rank) out[rank] = to_float(column[rank * call.in_features]);
    }
  });
}

template <class T>
void low_rank_activate(const float* x, T* out, int64_t num_rows, int64_t size, int64_t code) {
  const Activation kind = static_cast<Activation>(code);
  for_each_row(num_rows, size, [=](int64_t row) {
    for_each_vector(size, [&](int64_t i, int n) {
      store_some(out + row * size + i, activate(load_some(x + row * size + i, n), kind), n);
    });
  });
}

}  // namespace
}  // namespace llmstack

// `num_tiles` is read when the call is made, so that a replayed call follows its tiles.
#define LLMSTACK_LOW_RANK(suffix, T, Out)                                                                          \
  extern "C" void llmstack_low_rank_add_##suffix(                                                                  \
      const llmstack::T* x, int64_t x_stride, int64_t in_features, llmstack::Out* y, int64_t out_features,         \
      const int64_t* parts, int64_t slot_stride, const int32_t* rows, const int32_t* tiles,                        \
      const int32_t* num_tiles, float* reduced, int64_t max_rank) {                                                \
    llmstack::low_rank_add(                                                                                        \
        llmstack::LowRankCall<llmstack::T, llmstack::Out>{                                                         \
            x, x_stride, in_features, y, out_features, reinterpret_cast<const llmstack::LowRankPart*>(parts),      \
            slot_stride, rows, tiles, reduced, max_rank},                                                          \
        *num_tiles);                                                                                               \
  }                                                                                                                \
  LLMSTACK_REPEATABLE(low_rank_add_##suffix)
#define LLMSTACK_LOW_RANK_EMBEDDING(suffix, T)                                                                     \
  extern "C" void llmstack_low_rank_add_to_embedding_##suffix(                                                     \
      const int64_t* ids, int64_t num_ids, llmstack::T* y, int64_t out_features, const int64_t* parts,             \
      int64_t slot_stride, const int32_t* rows, const int32_t* tiles, const int32_t* num_tiles, float* reduced,    \
      int64_t max_rank) {                                                                                          \
    llmstack::low_rank_add_to_embedding(                                                                           \
        llmstack::LowRankCall<llmstack::T, llmstack::T>{                                                           \
            nullptr, 0, num_ids, y, out_features, reinterpret_cast<const llmstack::LowRankPart*>(parts),           \
            slot_stride, rows, tiles, reduced, max_rank},                                                          \
        ids, *num_tiles);                                                                                          \
  }                                                                                                                \
  LLMSTACK_REPEATABLE(low_rank_add_to_embedding_##suffix)
#define LLMSTACK_LOW_RANK_ACTIVATE(suffix, T)                                                                      \
  extern "C" void llmstack_low_rank_activate_##suffix(const float* x, llmstack::T* out, int64_t num_rows,          \
                                                      int64_t size, int64_t activation) {                          \
    llmstack::low_rank_activate(x, out, num_rows, size, activation);                                               \
  }                                                                                                                \
  LLMSTACK_REPEATABLE(low_rank_activate_##suffix)

LLMSTACK_LOW_RANK(f32, Float32, Float32)
LLMSTACK_LOW_RANK(bf16, BFloat16, BFloat16)
LLMSTACK_LOW_RANK(f16, Float16, Float16)
LLMSTACK_LOW_RANK(bf16_f32, BFloat16, Float32)
LLMSTACK_LOW_RANK(f16_f32, Float16, Float32)
LLMSTACK_LOW_RANK_EMBEDDING(f32, Float32)
LLMSTACK_LOW_RANK_EMBEDDING(bf16, BFloat16)
LLMSTACK_LOW_RANK_EMBEDDING(f16, Float16)
LLMSTACK_LOW_RANK_ACTIVATE(f32, Float32)
LLMSTACK_LOW_RANK_ACTIVATE(bf16, BFloat16)
LLMSTACK_LOW_RANK_ACTIVATE(f16, Float16)
