// Linear layers over weights of bfloat16 by the tiles of AMX, for the variant `amx`.

#if defined(__AVX512BF16__)
#include "../native/repeat.h"
#include "native_tile_panels.h"

namespace llmstack {
namespace {

void multiply_pairs_by_tiles(const LinearCall<BFloat16>& whole, const BFloat16* packed) {
  constexpr int64_t kSize = sizeof(BFloat16);
  for_each_part(whole, rows_of_part(whole.steps * 2 * kSize), [&](const LinearCall<BFloat16>& call) {
    const TileRows rows{reinterpret_cast<const uint8_t*>(call.x), call.row_stride * kSize};
    multiply_by_tiles<BFloat16Tiles>(
        call, rows, call.steps, packed, [&](int64_t row, int64_t num_rows, int64_t panel, Floats* sums) {
          store_sums(call, row, static_cast<int>(num_rows), panel * kPanel, kVectors, sums);
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
    llmstack::multiply_pairs_by_tiles(                                                                                   \
        llmstack::LinearCall<llmstack::BFloat16>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::BFloat16>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},                   \
        packed);                                                                                                         \
  }                                                                                                                      \
  LLMSTACK_REPEATABLE(amx_linear_##suffix)

LLMSTACK_LINEAR_BY_TILES(bf16, BFloat16)
LLMSTACK_LINEAR_BY_TILES(bf16_f32, Float32)
#endif
