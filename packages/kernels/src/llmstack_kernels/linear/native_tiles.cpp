// Linear layers over weights of bfloat16 by the tiles of AMX, for the variant `amx`.
//
// Weights lie as for vectors: the pairs of 16 inputs' steps are a tile's rows. Sums pass through memory between stretches of
// inputs, which changes no bit of them.

#include "../native/repeat.h"
#include "native.h"

#if defined(__AVX512BF16__)
#include "native_tiles.h"

namespace llmstack {
namespace {

constexpr int64_t kProductSteps = 16, kProductInputs = 2 * kProductSteps;  // of one product of tiles
constexpr int64_t kPanelProduct = kProductInputs * kPanel;                 // weights of a panel for it
constexpr int64_t kPanelStepBytes = 2 * kPanel * sizeof(BFloat16);
constexpr int64_t kProductBytes = kProductSteps * kPanelStepBytes;
constexpr int64_t kMostBlockRows = 2 * kMostTileRows;

// A stretch of a panel, whose sums then pass through memory: with fewer products that would take as long as they do.
constexpr int64_t kStretchProducts = 32;
constexpr int64_t kTilesAheadBytes = 16384;
// Rows stay in the second-level cache while all panels pass over them: half of it, which has 2 MiB wherever there are tiles.
constexpr int64_t kPartRowBytes = 1 << 20;

int64_t rows_of_part(const LinearCall<BFloat16>& call) {
  const int64_t fitting = kPartRowBytes / (call.steps * 4) / kMostBlockRows * kMostBlockRows;
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

// Up to 32 rows of inputs.
struct TileRows {
  const BFloat16* x;
  int64_t bytes;  // from row to row

  const BFloat16* second() const {
    return reinterpret_cast<const BFloat16*>(reinterpret_cast<const char*>(x) + kMostTileRows * bytes);
  }
};

// Adds products of up to 16 rows and a panel to sums in tiles 0 to 3.
void add_short(TileRows rows, const BFloat16* weights, int64_t products, TilesAhead& ahead) {
  for (int64_t i = 0; i < products; ++i, weights += kPanelProduct) {
    ahead.prefetch();
    load_tile<4>(rows.x + i * kProductInputs, rows.bytes);
    load_tile<5>(weights, kPanelStepBytes);
    add_tile_products<0, 4, 5>();
    load_tile<6>(weights + 32, kPanelStepBytes);
    add_tile_products<1, 4, 6>();
    load_tile<7>(weights + 64, kPanelStepBytes);
    add_tile_products<2, 4, 7>();
    load_tile<5>(weights + 96, kPanelStepBytes);
    add_tile_products<3, 4, 5>();
  }
}

// The same of 17 to 32 rows and half a panel.
void add_tall(TileRows rows, const BFloat16* weights, int64_t products, TilesAhead& ahead) {
  const BFloat16* second = rows.second();
  for (int64_t i = 0; i < products; ++i, weights += kPanelProduct) {
    ahead.prefetch();
    load_tile<6>(weights, kPanelStepBytes);
    load_tile<4>(rows.x + i * kProductInputs, rows.bytes);
    add_tile_products<0, 4, 6>();
    load_tile<7>(weights + 32, kPanelStepBytes);
    add_tile_products<1, 4, 7>();
    load_tile<5>(second + i * kProductInputs, rows.bytes);
    add_tile_products<2, 5, 6>();
    add_tile_products<3, 5, 7>();
  }
}

// What tiles hold for a block of so many rows.
void configure(int64_t num_rows) {
  const bool is_tall = num_rows > kMostTileRows;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kMostTileRows);
  if (is_tall) {
    for (int tile : {2, 3, 5}) shapes.set(tile, num_rows - kMostTileRows);
  } else {
    for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, num_rows);
  }
  shapes.load();
}

template <int kTile>
inline void begin_sums(const float* sums, bool is_first) {
  is_first ? clear_tile<kTile>() : load_tile<kTile>(sums, kPanel * sizeof(float));
}

// Some inputs of a panel.
struct Stretch {
  const BFloat16* weights;
  int64_t products;
  bool is_first, is_last;
};

// Passes over a stretch that so many rows take.
constexpr int64_t passes_of(int64_t rows) {
  return rows / kMostBlockRows * 2 + (rows % kMostBlockRows > kMostTileRows) + (rows % kMostBlockRows > 0);
}

// Adds a stretch to `sums` [num_rows, kPanel], which are zeros before the first one.
void add_stretch(int64_t num_rows, TileRows rows, const Stretch& stretch, float* sums, TilesAhead ahead) {
  constexpr int64_t kStride = kPanel * sizeof(float);
  const bool is_tall = num_rows > kMostTileRows, is_first = stretch.is_first;
  for (int half = 0; half <= is_tall; ++half) {
    float* const first = sums + half * (kPanel / 2);
    float* const third = first + (is_tall ? kMostTileRows * kPanel : 2 * kLanes);
    begin_sums<0>(first, is_first), begin_sums<1>(first + kLanes, is_first);
    begin_sums<2>(third, is_first), begin_sums<3>(third + kLanes, is_first);
    if (is_tall) {
      add_tall(rows, stretch.weights + half * kPanel, stretch.products, ahead);
    } else {
      add_short(rows, stretch.weights, stretch.products, ahead);
    }
    store_tile<0>(first, kStride), store_tile<1>(first + kLanes, kStride);
    store_tile<2>(third, kStride), store_tile<3>(third + kLanes, kStride);
  }
}

// The inputs behind the last whole product, and their weights, with zeros behind them.
struct Tail {
  alignas(64) BFloat16 weights[kPanelProduct] = {}, rows[kMostBlockRows * kProductInputs];

  Tail(const BFloat16* panel, int64_t steps) {
    std::memcpy(weights, panel + steps / kProductSteps * kPanelProduct, steps % kProductSteps * kPanelStepBytes);
  }
  TileRows of(const BFloat16* x, int64_t stride, int64_t num_rows, int64_t num_inputs) {
    std::memset(static_cast<void*>(rows), 0, sizeof(rows));
    for (int64_t r = 0; r < num_rows; ++r) {
      std::memcpy(rows + r * kProductInputs, x + r * stride, num_inputs * sizeof(BFloat16));
    }
    return {rows, kProductInputs * sizeof(BFloat16)};
  }
};

// The products of one panel and some rows, whose sums lie in memory between stretches: [rows, kPanel].
struct PanelProduct {
  const LinearCall<BFloat16>& call;
  Place<kPanelStepBytes> place;
  int64_t first_column, first_row, end_row;
  Floats* sums;
  int64_t shape = 0;  // rows that tiles are configured for

  void run() {
    const auto* weights = reinterpret_cast<const BFloat16*>(place.start);
    const int64_t products = call.steps / kProductSteps, left = call.steps % kProductSteps;
    for (int64_t begin = 0; begin < products; begin += kStretchProducts) {
      const int64_t count = products - begin < kStretchProducts ? products - begin : kStretchProducts;
      const bool is_last = begin + count == products && !left;
      add({weights + begin * kPanelProduct, count, begin == 0, is_last}, begin, [&](int64_t row, int64_t) {
        return TileRows{call.x + row * call.row_stride + begin * kProductInputs, call.row_stride * 2};
      });
    }
    if (left) {
      Tail tail(weights, call.steps);
      add({tail.weights, 1, products == 0, true}, products, [&](int64_t row, int64_t num_rows) {
        return tail.of(call.x + row * call.row_stride + products * kProductInputs, call.row_stride, num_rows, 2 * left);
      });
    }
    release_tiles();
  }

  template <class RowsFrom>
  void add(const Stretch& stretch, int64_t begin, const RowsFrom& rows_from) {
    const int64_t passes = passes_of(end_row - first_row);
    for (int64_t row = first_row, pass = 0; row < end_row; row += kMostBlockRows) {
      const int64_t num_rows = end_row - row < kMostBlockRows ? end_row - row : kMostBlockRows;
      if (num_rows != shape) configure(shape = num_rows);
      Floats* const own = sums + (stretch.is_first && stretch.is_last ? 0 : (row - first_row) * kVectors);
      if (stretch.is_last) fetch_outputs(row, num_rows);
      const TilesAhead ahead = ahead_of(begin, stretch.products, pass, passes);
      pass += passes_of(num_rows);
      add_stretch(num_rows, rows_from(row, num_rows), stretch, reinterpret_cast<float*>(own), ahead);
      if (stretch.is_last) store_sums(call, row, static_cast<int>(num_rows), first_column, kVectors, own);
    }
  }

  // Outputs are written soon, and their lines read before that.
  void fetch_outputs(int64_t row, int64_t num_rows) const {
    const int64_t size = call.is_out_float ? sizeof(float) : sizeof(BFloat16);
    const char* out = static_cast<const char*>(call.out) + (row * call.out_features + first_column) * size;
    for (int64_t r = 0; r < num_rows; ++r, out += call.out_features * size) {
      for (int64_t i = 0; i < kPanel * size; i += 64) __builtin_prefetch(out + i, 1, 3);
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

void multiply_by_tiles(const LinearCall<BFloat16>& whole, const BFloat16* packed) {
  for_each_part(whole, rows_of_part(whole), [&](const LinearCall<BFloat16>& call) {
    for_each_panel(call, call.steps * kPanelStepBytes, [&](int64_t panel, int64_t row, int64_t end) {
      static thread_local std::vector<Floats> memory;
      const int64_t size = (end - row) * kVectors;
      if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
      PanelProduct{call, Place<kPanelStepBytes>::of(packed, panel, call.steps), panel * kPanel, row, end, memory.data()}.run();
    });
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_LINEAR_BY_TILES(suffix, Out)                                                                            \
  extern "C" void llmstack_amx_linear_##suffix(                                                                          \
      const llmstack::BFloat16* x, int64_t num_rows, int64_t row_stride, const llmstack::BFloat16* packed,               \
      int64_t in_features, int64_t out_features, const llmstack::BFloat16* bias, const llmstack::Out* residual,          \
      llmstack::Out* out, int64_t activation) {                                                                          \
    llmstack::multiply_by_tiles(                                                                                         \
        llmstack::LinearCall<llmstack::BFloat16>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::BFloat16>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},                   \
        packed);                                                                                                         \
  }                                                                                                                      \
  LLMSTACK_REPEATABLE(amx_linear_##suffix)

LLMSTACK_LINEAR_BY_TILES(bf16, BFloat16)
LLMSTACK_LINEAR_BY_TILES(bf16_f32, Float32)
#endif
