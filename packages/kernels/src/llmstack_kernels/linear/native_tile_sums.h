// The sizes of tiles. Sums of four rows and three vectors of columns, or of five or six rows and two, with AVX2, where weights
// are pairs of bfloat16.
//
// Sums, vectors of weights, an input and a mask take all 16 registers. GCC 12 keeps sums in memory instead, at half the
// speed, so the products stand in assembler. (Tiles of four rows and two vectors have eight sums: each waits for its last
// product.)
#pragma once

#include "native_operands.h"

namespace llmstack {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif
#if defined(__AVX2__)
constexpr int kPairRows = kTileRows;
#else
constexpr int kPairRows = 4;  // of a tile whose weights are in pairs, both halves of which take registers
#endif
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int kTallRows = 12, kTallVectors = 2;  // of a tile whose weights are widened
#else
constexpr int kTallRows = kTileRows, kTallVectors = kTileVectors;
#endif

constexpr int kFourRows = 4, kFourRowsVectors = 3;

#if defined(__AVX2__) && !defined(__AVX512F__)
template <int kRows, int kColumnVectors>
constexpr bool kHasPairSums = (kRows == kFourRows && kColumnVectors == kFourRowsVectors) ||
                              ((kRows == 5 || kRows == 6) && kColumnVectors == 2);

alignas(32) constexpr uint32_t kUpperHalves[kLanes] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                       0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

// sums[row][vector] = sums[row][vector] + x[row][0] * first halves + x[row][1] * second halves, of pairs[vector].
inline __attribute__((always_inline)) void add_pairs(const float* x, int64_t row_stride, const BFloat16* pairs,
                                                     Floats (&sums)[kFourRows][kFourRowsVectors]) {
  const int64_t row_bytes = row_stride * sizeof(float);
#define LLMSTACK_ADD_ROW(input, first, second, third)   \
  "vbroadcastss " input ", %%ymm15\n"                   \
  "vfmadd231ps %%ymm12, %%ymm15, %[" first "]\n"        \
  "vfmadd231ps %%ymm13, %%ymm15, %[" second "]\n"       \
  "vfmadd231ps %%ymm14, %%ymm15, %[" third "]\n"
#define LLMSTACK_ADD_ROWS(offset)                                        \
  LLMSTACK_ADD_ROW(offset "(%[x])", "s00", "s01", "s02")                 \
  LLMSTACK_ADD_ROW(offset "(%[x],%[row])", "s10", "s11", "s12")          \
  LLMSTACK_ADD_ROW(offset "(%[x],%[row],2)", "s20", "s21", "s22")        \
  LLMSTACK_ADD_ROW(offset "(%[x],%[three_rows])", "s30", "s31", "s32")
  asm("vmovdqu (%[pairs]), %%ymm12\n"
      "vmovdqu 32(%[pairs]), %%ymm13\n"
      "vmovdqu 64(%[pairs]), %%ymm14\n"
      "vpslld $16, %%ymm12, %%ymm12\n"
      "vpslld $16, %%ymm13, %%ymm13\n"
      "vpslld $16, %%ymm14, %%ymm14\n"
      LLMSTACK_ADD_ROWS("0")
      "vmovdqa %[upper], %%ymm14\n"
      "vpand (%[pairs]), %%ymm14, %%ymm12\n"
      "vpand 32(%[pairs]), %%ymm14, %%ymm13\n"
      "vpand 64(%[pairs]), %%ymm14, %%ymm14\n"
      LLMSTACK_ADD_ROWS("4")
      : [s00] "+x"(sums[0][0]), [s01] "+x"(sums[0][1]), [s02] "+x"(sums[0][2]),
        [s10] "+x"(sums[1][0]), [s11] "+x"(sums[1][1]), [s12] "+x"(sums[1][2]),
        [s20] "+x"(sums[2][0]), [s21] "+x"(sums[2][1]), [s22] "+x"(sums[2][2]),
        [s30] "+x"(sums[3][0]), [s31] "+x"(sums[3][1]), [s32] "+x"(sums[3][2])
      : [x] "r"(x), [row] "r"(row_bytes), [three_rows] "r"(3 * row_bytes), [pairs] "r"(pairs), [upper] "m"(kUpperHalves)
      : "xmm12", "xmm13", "xmm14", "xmm15", "memory");
#undef LLMSTACK_ADD_ROWS
#undef LLMSTACK_ADD_ROW
}

#define LLMSTACK_ADD_ROW(input, first, second)    \
  "vbroadcastss " input ", %%ymm14\n"             \
  "vfmadd231ps %%ymm12, %%ymm14, %[" first "]\n"  \
  "vfmadd231ps %%ymm13, %%ymm14, %[" second "]\n"
#define LLMSTACK_ADD_FIVE_ROWS(offset)                      \
  LLMSTACK_ADD_ROW(offset "(%[x])", "s00", "s01")           \
  LLMSTACK_ADD_ROW(offset "(%[x],%[row])", "s10", "s11")    \
  LLMSTACK_ADD_ROW(offset "(%[x],%[row],2)", "s20", "s21")  \
  LLMSTACK_ADD_ROW(offset "(%[x3])", "s30", "s31")          \
  LLMSTACK_ADD_ROW(offset "(%[x3],%[row])", "s40", "s41")
#define LLMSTACK_ADD_SIX_ROWS(offset)  \
  LLMSTACK_ADD_FIVE_ROWS(offset)       \
  LLMSTACK_ADD_ROW(offset "(%[x3],%[row],2)", "s50", "s51")
#define LLMSTACK_ADD_PAIRS(add_rows)          \
  "vmovdqu (%[pairs]), %%ymm12\n"             \
  "vmovdqu 32(%[pairs]), %%ymm13\n"           \
  "vpslld $16, %%ymm12, %%ymm12\n"            \
  "vpslld $16, %%ymm13, %%ymm13\n"            \
  add_rows("0")                               \
  "vmovdqa %[upper], %%ymm13\n"               \
  "vpand (%[pairs]), %%ymm13, %%ymm12\n"      \
  "vpand 32(%[pairs]), %%ymm13, %%ymm13\n"    \
  add_rows("4")
#define LLMSTACK_FIVE_ROWS_OF_SUMS                                                                    \
  [s00] "+x"(sums[0][0]), [s01] "+x"(sums[0][1]), [s10] "+x"(sums[1][0]), [s11] "+x"(sums[1][1]),     \
  [s20] "+x"(sums[2][0]), [s21] "+x"(sums[2][1]), [s30] "+x"(sums[3][0]), [s31] "+x"(sums[3][1]),     \
  [s40] "+x"(sums[4][0]), [s41] "+x"(sums[4][1])
#define LLMSTACK_PAIR_OPERANDS \
  [x] "r"(x), [x3] "r"(x + 3 * row_stride), [row] "r"(row_stride * 4), [pairs] "r"(pairs), [upper] "m"(kUpperHalves)

inline __attribute__((always_inline)) void add_pairs(const float* x, int64_t row_stride, const BFloat16* pairs,
                                                     Floats (&sums)[5][2]) {
  asm(LLMSTACK_ADD_PAIRS(LLMSTACK_ADD_FIVE_ROWS)
      : LLMSTACK_FIVE_ROWS_OF_SUMS
      : LLMSTACK_PAIR_OPERANDS
      : "xmm12", "xmm13", "xmm14", "memory");
}
inline __attribute__((always_inline)) void add_pairs(const float* x, int64_t row_stride, const BFloat16* pairs,
                                                     Floats (&sums)[6][2]) {
  asm(LLMSTACK_ADD_PAIRS(LLMSTACK_ADD_SIX_ROWS)
      : LLMSTACK_FIVE_ROWS_OF_SUMS, [s50] "+x"(sums[5][0]), [s51] "+x"(sums[5][1])
      : LLMSTACK_PAIR_OPERANDS
      : "xmm12", "xmm13", "xmm14", "memory");
}
#undef LLMSTACK_PAIR_OPERANDS
#undef LLMSTACK_FIVE_ROWS_OF_SUMS
#undef LLMSTACK_ADD_PAIRS
#undef LLMSTACK_ADD_SIX_ROWS
#undef LLMSTACK_ADD_FIVE_ROWS
#undef LLMSTACK_ADD_ROW
#else
template <int, int>
constexpr bool kHasPairSums = false;
#endif

}  // namespace llmstack
