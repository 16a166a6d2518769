// Sums of four rows and three vectors of columns with AVX2, whose weights are pairs of bfloat16.
//
// Twelve sums, three vectors of weights and an input take all 16 registers. GCC 12 keeps sums in memory instead, at half the
// speed, so the products stand in assembler. (Tiles of two vectors have eight sums: each waits for its last product.)
#pragma once

#include "native_operands.h"

namespace llmstack {

constexpr int kFourRows = 4, kFourRowsVectors = 3;

#if defined(__AVX2__) && !defined(__AVX512F__)
// sums[row][vector] = sums[row][vector] + x[row][0] * first halves + x[row][1] * second halves, of pairs[vector].
inline __attribute__((always_inline)) void add_pairs(const float* x, int64_t row_stride, const BFloat16* pairs,
                                                     Floats (&sums)[kFourRows][kFourRowsVectors]) {
  alignas(32) static constexpr uint32_t kUpperHalves[kLanes] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                                0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
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
#endif

}  // namespace llmstack
