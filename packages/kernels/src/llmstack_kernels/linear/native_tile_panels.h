// Products of rows and a panel by tiles. A step of a panel is 256 bytes, four for each column; sixteen steps are what one
// product of tiles takes. Weights lie as for vectors, and what a word of a row or of a sum is, the kind of tiles says.
//
// Sums pass through memory between stretches of inputs, which changes no bit of them.
#pragma once

#include <vector>

#include "native.h"
#include "native_tiles.h"

namespace llmstack {

constexpr int64_t kProductSteps = 16, kTileStepBytes = 4 * kPanel, kProductBytes = kProductSteps * kTileStepBytes;
constexpr int64_t kMostBlockRows = 2 * kMostTileRows;

// A stretch of a panel, whose sums then pass through memory: with fewer products that would take as long as they do.
constexpr int64_t kStretchProducts = 32;
constexpr int64_t kTilesAheadBytes = 16384;

// Rows that stay in the second-level cache while all panels pass over them.
inline int64_t rows_of_part(int64_t row_bytes) {
  const int64_t fitting = cuts.row_part / row_bytes / kMostBlockRows * kMostBlockRows;
  return fitting > kMostBlockRows ? fitting : kMostBlockRows;
}

// What is read ahead of some products: lines that begin before `end`.
struct TilesAhead {
  const uint8_t *line, *end;
  int64_t bytes;  // of each product

  void prefetch() {
    for (end += bytes; line < end; line += 64) __builtin_prefetch(line, 0, 2);
  }
};

// Rows of inputs, `stride` bytes apart.
struct TileRows {
  const uint8_t* x;
  int64_t stride;
};

// Some inputs of a panel.
struct Stretch {
  const uint8_t* weights;
  int64_t products;
  bool is_first, is_last;
};

// Adds products of up to 16 rows and a panel to sums in tiles 0 to 3.
template <class Tiles>
void add_short(TileRows rows, const uint8_t* weights, int64_t products, TilesAhead& ahead) {
  for (int64_t i = 0; i < products; ++i, weights += kProductBytes) {
    ahead.prefetch();
    load_tile<4>(rows.x + i * kTileRowBytes, rows.stride);
    load_tile<5>(weights, kTileStepBytes);
    Tiles::template add<0, 4, 5>();
    load_tile<6>(weights + kTileRowBytes, kTileStepBytes);
    Tiles::template add<1, 4, 6>();
    load_tile<7>(weights + 2 * kTileRowBytes, kTileStepBytes);
    Tiles::template add<2, 4, 7>();
    load_tile<5>(weights + 3 * kTileRowBytes, kTileStepBytes);
    Tiles::template add<3, 4, 5>();
  }
}

// The same of 17 to 32 rows and half a panel.
template <class Tiles>
void add_tall(TileRows rows, const uint8_t* weights, int64_t products, TilesAhead& ahead) {
  const uint8_t* second = rows.x + kMostTileRows * rows.stride;
  for (int64_t i = 0; i < products; ++i, weights += kProductBytes) {
    ahead.prefetch();
    load_tile<6>(weights, kTileStepBytes);
    load_tile<4>(rows.x + i * kTileRowBytes, rows.stride);
    Tiles::template add<0, 4, 6>();
    load_tile<7>(weights + kTileRowBytes, kTileStepBytes);
    Tiles::template add<1, 4, 7>();
    load_tile<5>(second + i * kTileRowBytes, rows.stride);
    Tiles::template add<2, 5, 6>();
    Tiles::template add<3, 5, 7>();
  }
}

// What tiles hold for a block of so many rows.
inline void configure_tiles(int64_t num_rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kMostTileRows);
  if (num_rows > kMostTileRows) {
    for (int tile : {2, 3, 5}) shapes.set(tile, num_rows - kMostTileRows);
  } else {
    for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, num_rows);
  }
  shapes.load();
}

template <int kTile>
inline void begin_sums(const Floats* sums, bool is_first) {
  is_first ? clear_tile<kTile>() : load_tile<kTile>(sums, kVectors * sizeof(Floats));
}

// Adds a stretch to `sums` [num_rows, kVectors], which are zeros before the first one.
template <class Tiles>
void add_stretch(int64_t num_rows, TileRows rows, const Stretch& stretch, Floats* sums, TilesAhead ahead) {
  constexpr int64_t kStride = kVectors * sizeof(Floats);
  const bool is_tall = num_rows > kMostTileRows, is_first = stretch.is_first;
  for (int half = 0; half <= is_tall; ++half) {
    Floats* const first = sums + half * (kVectors / 2);
    Floats* const third = first + (is_tall ? kMostTileRows * kVectors : kVectors / 2);
    begin_sums<0>(first, is_first), begin_sums<1>(first + 1, is_first);
    begin_sums<2>(third, is_first), begin_sums<3>(third + 1, is_first);
    if (is_tall) {
      add_tall<Tiles>(rows, stretch.weights + half * 2 * kTileRowBytes, stretch.products, ahead);
    } else {
      add_short<Tiles>(rows, stretch.weights, stretch.products, ahead);
    }
    store_tile<0>(first, kStride), store_tile<1>(first + 1, kStride);
    store_tile<2>(third, kStride), store_tile<3>(third + 1, kStride);
  }
}

// Passes over a stretch that so many rows take.
constexpr int64_t passes_of(int64_t rows) {
  return rows / kMostBlockRows * 2 + (rows % kMostBlockRows > kMostTileRows) + (rows % kMostBlockRows > 0);
}

// The inputs behind the last whole product, and their weights, with zeros behind them.
struct Tail {
  alignas(64) uint8_t weights[kProductBytes] = {}, rows[kMostBlockRows * kTileRowBytes] = {};

  Tail(const uint8_t* from, int64_t steps) { std::memcpy(weights, from, steps * kTileStepBytes); }
  TileRows of(TileRows from, int64_t num_rows, int64_t steps) {
    for (int64_t r = 0; r < num_rows; ++r) std::memcpy(rows + r * kTileRowBytes, from.x + r * from.stride, steps * 4);
    return {rows, kTileRowBytes};
  }
};

// The products of one panel and some rows. `store(row, num_rows, sums)` gets the sums of a block, [num_rows, kVectors], and
// `fetch(row, num_rows)` is called before they are computed.
template <class Tiles, class Store, class Fetch>
struct PanelProduct {
  TileRows rows;  // of the first of all rows
  int64_t steps;
  Place<kTileStepBytes> place;
  int64_t first_row, end_row;
  const Store& store;
  const Fetch& fetch;
  Floats* sums = nullptr;
  int64_t shape = 0;  // rows that tiles are configured for

  void run() {
    static thread_local std::vector<Floats> memory;
    const int64_t size = (end_row - first_row) * kVectors, products = steps / kProductSteps, left = steps % kProductSteps;
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    sums = memory.data();
    const auto rows_at = [&](int64_t row, int64_t product) {
      return TileRows{rows.x + row * rows.stride + product * kTileRowBytes, rows.stride};
    };
    for (int64_t begin = 0; begin < products; begin += kStretchProducts) {
      const int64_t count = products - begin < kStretchProducts ? products - begin : kStretchProducts;
      const bool is_last = begin + count == products && !left;
      add({place.start + begin * kProductBytes, count, begin == 0, is_last}, begin,
          [&](int64_t row, int64_t) { return rows_at(row, begin); });
    }
    if (left) {
      Tail tail(place.start + products * kProductBytes, left);
      add({tail.weights, 1, products == 0, true}, products,
          [&](int64_t row, int64_t num_rows) { return tail.of(rows_at(row, products), num_rows, left); });
    }
    release_tiles();
  }

  template <class RowsFrom>
  void add(const Stretch& stretch, int64_t begin, const RowsFrom& rows_from) {
    const int64_t passes = passes_of(end_row - first_row);
    for (int64_t row = first_row, pass = 0; row < end_row; row += kMostBlockRows) {
      const int64_t num_rows = end_row - row < kMostBlockRows ? end_row - row : kMostBlockRows;
      if (num_rows != shape) configure_tiles(shape = num_rows);
      Floats* const own = sums + (stretch.is_first && stretch.is_last ? 0 : (row - first_row) * kVectors);
      if (stretch.is_last) fetch(row, num_rows);
      const TilesAhead ahead = ahead_of(begin, stretch.products, pass, passes);
      pass += passes_of(num_rows);
      add_stretch<Tiles>(num_rows, rows_from(row, num_rows), stretch, own, ahead);
      if (stretch.is_last) store(row, num_rows, own);
    }
  }

  // Each pass reads a share of what the thread needs next, of this panel or of its next one.
  TilesAhead ahead_of(int64_t begin, int64_t products, int64_t pass, int64_t passes) const {
    const int64_t bytes = products * kProductBytes, offset = begin * kProductBytes + (passes == 1 ? kTilesAheadBytes : bytes);
    const uint8_t* from = place.start + offset + (offset < place.bytes ? 0 : place.distance - place.bytes);
    const uint8_t* own = from + bytes * pass / passes;
    return {own, own, kProductBytes / passes};
  }
};

// Multiplies all rows of a call, `steps` words each, and all panels by `Tiles`. `store(row, num_rows, panel, sums)` finishes a
// block's sums.
template <class Tiles, class T, class Store>
void multiply_by_tiles(const LinearCall<T>& call, TileRows rows, int64_t steps, const void* packed, const Store& store) {
  const int64_t size = call.is_out_float ? sizeof(float) : sizeof(T);
  for_each_panel(call, steps * kTileStepBytes, [&](int64_t panel, int64_t row, int64_t end) {
    const auto store_block = [&](int64_t at, int64_t num_rows, Floats* sums) { store(at, num_rows, panel, sums); };
    // Outputs are written soon, and their lines read before that.
    const auto fetch = [&](int64_t at, int64_t num_rows) {
      const char* out = static_cast<const char*>(call.out) + (at * call.out_features + panel * kPanel) * size;
      for (int64_t r = 0; r < num_rows; ++r, out += call.out_features * size) {
        for (int64_t i = 0; i < kPanel * size; i += 64) __builtin_prefetch(out + i, 1, 3);
      }
    };
    const auto place = Place<kTileStepBytes>::of(packed, panel, steps);
    PanelProduct<Tiles, decltype(store_block), decltype(fetch)>{rows, steps, place, row, end, store_block, fetch}.run();
  });
}

}  // namespace llmstack
