// Roofs of one thread: how fast it reads memory, and how fast it multiplies operands that stay in registers.

#include "linear/native_tiles.h"
#include "native/simd.h"

namespace llmstack {
namespace {

constexpr int kSums = 12;  // more than a processor has products under way, and few enough to stay in registers

#if defined(__AVX512F__)
inline Ints multiply_integers(Ints sums, Ints x, Ints w) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#else
  return sums + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#endif
}
#elif defined(__AVX2__)
inline Ints multiply_integers(Ints sums, Ints x, Ints w) {
  return sums + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
}
#else
inline Ints multiply_integers(Ints sums, Ints x, Ints w) {
  return sums + x * w;
}
#endif

#if defined(__AVX512VNNI__)
constexpr int kIntegerProducts = 4 * kLanes;
#elif defined(__AVX2__)
constexpr int kIntegerProducts = 2 * kLanes;
#else
constexpr int kIntegerProducts = kLanes;
#endif

#if defined(__AVX512BF16__)
constexpr int kBFloat16Products = 2 * kLanes;
inline Floats multiply_bfloat16(Floats sums, Floats x, Floats w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
}
#else
constexpr int kBFloat16Products = kLanes;
inline Floats multiply_bfloat16(Floats sums, Floats x, Floats w) {
  return multiply_add(x, w, sums);
}
#endif

// Products made: `steps` times kSums, each `products` of them. (Sums in an array would be stored in every step.)
template <class Vector, class Multiply>
int64_t repeat(int64_t steps, int products, const Multiply& multiply) {
  const auto zeros = [] {  // for all that the compiler knows, not twice the same
    Vector v{};
    asm volatile("" : "+m"(v));
    return v;
  };
  Vector a = zeros(), b = zeros(), c = zeros(), d = zeros(), e = zeros(), f = zeros(), x = zeros(), w = zeros();
  Vector g = zeros(), h = zeros(), i = zeros(), j = zeros(), k = zeros(), l = zeros();
  const auto add = [&](auto&... sums) { ((sums = multiply(sums, x, w)), ...); };
  for (int64_t step = 0; step < steps; ++step) {
    add(a, b, c, d, e, f, g, h, i, j, k, l);
    asm volatile("" : "+m"(x), "+m"(w));
  }
  Vector total = a + b + c + d + e + f + g + h + i + j + k + l;
  asm volatile("" : "+m"(total));
  return steps * kSums * products;
}

}  // namespace
}  // namespace llmstack

extern "C" int64_t roofline_float32(int64_t steps) {
  using namespace llmstack;
  return repeat<Floats>(steps, kLanes, [](Floats sums, Floats x, Floats w) { return multiply_add(x, w, sums); });
}
extern "C" int64_t roofline_bfloat16(int64_t steps) {
  using namespace llmstack;
  return repeat<Floats>(steps, kBFloat16Products, [](auto... v) { return multiply_bfloat16(v...); });
}
#if defined(__AVX512BF16__)
// The same of the variant `amx`, by the tiles.
template <class Tiles>
static int64_t repeat_tiles(int64_t steps) {
  llmstack::TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, llmstack::kMostTileRows);
  shapes.load();
  for (int64_t step = 0; step < steps; ++step) {
    Tiles::template add<0, 4, 6>(), Tiles::template add<1, 4, 7>();
    Tiles::template add<2, 5, 6>(), Tiles::template add<3, 5, 7>();
  }
  llmstack::release_tiles();
  return steps * 4 * llmstack::kMostTileRows * llmstack::kMostTileRows * llmstack::kTileRowBytes;
}
extern "C" int64_t roofline_amx_bfloat16(int64_t steps) {
  return repeat_tiles<llmstack::BFloat16Tiles>(steps) / 2;
}
extern "C" int64_t roofline_amx_int8(int64_t steps) {
  return repeat_tiles<llmstack::IntegerTiles>(steps);
}
#endif
extern "C" int64_t roofline_int8(int64_t steps) {
  using namespace llmstack;
  return repeat<Ints>(steps, kIntegerProducts, [](auto... v) { return multiply_integers(v...); });
}

// The sum of the words, which are read in `kStreams` places at once: that is faster than in one.
extern "C" uint64_t roofline_read(const uint32_t* words, int64_t count) {
  using namespace llmstack;
  constexpr int kStreams = 4;
  const int64_t part = count / kStreams / kLanes * kLanes;
  Words sums[kStreams] = {};
  for (int64_t i = 0; i < part; i += kLanes) {
    for (int s = 0; s < kStreams; ++s) {
      Words read;
      std::memcpy(&read, words + s * part + i, sizeof(read));
      sums[s] += read;
    }
  }
  uint64_t total = 0;
  for (int s = 0; s < kStreams; ++s) {
    for (int i = 0; i < kLanes; ++i) total += sums[s][i];
  }
  return total;
}
