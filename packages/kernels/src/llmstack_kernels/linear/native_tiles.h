// The matrix registers of AMX: eight tiles of 16 rows of 64 bytes, and their products.
//
// They are written in assembler, since the compilers' functions take numbers of tiles in the source text alone. A product of
// bfloat16 adds, for each row and column, 32 inputs to a sum: those with even and those with odd places in a chain of fused
// products each, in ascending order, and then both chains together. So the order depends on the number of inputs alone.
#pragma once

#include <cstdint>

namespace llmstack {

constexpr int kMostTileRows = 16;
constexpr int kTileRowBytes = 64;

// What `ldtilecfg` reads: how many rows and bytes of a row each tile has.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows) {
    row_bytes[tile] = kTileRowBytes;
    rows[tile] = static_cast<uint8_t>(num_rows);
  }
  // All tiles are zeros then.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

// Without it every switch between threads would save the tiles.
inline void release_tiles() {
  asm volatile("tilerelease" ::: "memory");
}

template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}

// sums += rows · columns: of bfloat16, or of integers of 8 bits, those of rows without a sign.
struct BFloat16Tiles {
  template <int kSums, int kRows, int kColumns>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
  }
};
struct IntegerTiles {
  template <int kSums, int kRows, int kColumns>
  static void add() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
  }
};

}  // namespace llmstack
