// Products of rounded inputs and small numbers in segments of inputs: the layout of weights, and tiles of sums.
//
// A segment is a run of 32 or 16 inputs. Rows have a scale for each segment, weights one for each group of segments. Within a
// segment sums are integers, which are exact; segments are added in ascending order, with one rounding each. So all variants
// give the same bits, for any number of rows.
//
// A panel of 64 columns is a sequence of blocks. A block has the scales of its columns, then its segments. All that a segment
// needs lies together, so that a panel is read in order. Numbers have no sign; four of a column are the bytes of a word.
#pragma once

#include "native_widening.h"

namespace llmstack {

// What scales are stored in. With two levels a block has scales of float16, and each segment integers they are multiplied by.
enum class SegmentScales : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kTwoLevels = 3 };

// What is subtracted from a number: the middle of all numbers, a zero point of a group, or nothing, where a smallest value is
// added to the product.
enum class Zeros { kMiddle, kPoints, kSmallest };

template <int kNumberBits, Zeros kZeroKind, int kInputs = 32>
struct SegmentFormat {
  static constexpr int kBits = kNumberBits, kSegment = kInputs, kWords = kInputs / 4;  // words of four numbers
  static constexpr Zeros kZeros = kZeroKind;
  static constexpr bool kHasNibbles = kBits < 8, kHasHighBits = kBits > 4 && kBits < 8;
  static constexpr int kNibbleWords = kHasNibbles ? kWords / 2 : kWords;  // words in memory, without those of high bits
  static constexpr int kNumberBytes = (kNibbleWords + kHasHighBits) * kPanel * 4;
  static constexpr int kMiddle = 1 << (kBits - 1);
};

constexpr int64_t segment_scale_bytes(SegmentScales type) {
  return type == SegmentScales::kFloat32 ? 4 : 2;
}

// Where things lie in a block.
struct SegmentLayout {
  SegmentScales scales;
  int64_t segments_per_block, header_bytes, segment_header_bytes, segment_bytes, block_bytes;

  template <class Format>
  static SegmentLayout of(SegmentScales scales, int64_t segments_per_block) {
    const int64_t size = segment_scale_bytes(scales);
    const int64_t with_zeros = Format::kZeros == Zeros::kSmallest ? 2 * size : Format::kZeros == Zeros::kPoints ? size + 1 : size;
    const int64_t levels = scales == SegmentScales::kTwoLevels ? (Format::kZeros == Zeros::kSmallest ? 2 : 1) : 0;
    SegmentLayout layout{scales, segments_per_block, with_zeros * kPanel, levels * kPanel, 0, 0};
    layout.segment_bytes = layout.segment_header_bytes + Format::kNumberBytes;
    layout.block_bytes = layout.header_bytes + segments_per_block * layout.segment_bytes;
    return layout;
  }
  int64_t panel_bytes(int64_t segments) const {
    return (segments + segments_per_block - 1) / segments_per_block * block_bytes;
  }
};

// Rows of inputs, rounded: integers within ±127, and for each segment a scale and a second number, which depends on `Zeros`:
// the integers' sum times minus the middle, that sum as a float, or that times the scale. A segment of all rows lies together,
// so that a tile has one address for its rows.
struct RoundedRows {
  const int8_t* integers;  // [segments, stride, kSegment]
  const float* scales;     // [segments, stride]
  const int32_t* seconds;  // the same
  int64_t segments, stride;

  RoundedRows from(int64_t row, int kSegment) const {
    return {integers + row * kSegment, scales + row, seconds + row, segments, stride};
  }
  void go_on(int kSegment) { integers += stride * kSegment, scales += stride, seconds += stride; }
};

// ---- products ----

// Whether numbers of 8 bits are computed with a sign, as integers less 128.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kSignsBytes = true;
#else
constexpr bool kSignsBytes = false;
#endif

// kLanes bytes without a sign as 32-bit integers.
inline Ints widen_unsigned(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Ints x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}

inline Words load_words(const uint8_t* p) {
  Words x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline uint32_t word_at(const int8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// Sums of products in each lane. `add` takes a word of four numbers, which have no sign, and four inputs; without VNNI some
// sums have 16 bits, of which a lane has two, until `flush`.
#if defined(__AVX512VNNI__)
constexpr bool kBeginsWithSecond = true;  // a sum costs nothing more
template <int kBits>
struct Sums {
  Ints whole;

  Sums() = default;
  explicit Sums(int32_t first) : whole(Ints{} + first) {}
  void add(Words numbers, uint32_t inputs, int) {
    whole = (Ints)_mm512_dpbusd_epi32((__m512i)whole, (__m512i)numbers, _mm512_set1_epi32(static_cast<int32_t>(inputs)));
  }
  Ints flush() const { return whole; }
};
#elif defined(__AVX2__)
constexpr bool kBeginsWithSecond = false;
#if defined(__AVX512F__)
inline Ints pairs_of_bytes(Words numbers, uint32_t inputs) {
  return (Ints)_mm512_maddubs_epi16((__m512i)numbers, _mm512_set1_epi32(static_cast<int32_t>(inputs)));
}
inline Ints add_halves(Ints a, Ints b) {
  return (Ints)_mm512_add_epi16((__m512i)a, (__m512i)b);
}
inline Ints pairs_of_halves(Ints a, Ints b) {
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
inline Ints even_bytes(Ints x) {
  return (Ints)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
}
inline Ints odd_bytes(Ints x) {
  return (Ints)_mm512_srai_epi16((__m512i)x, 8);
}
#else
inline Ints pairs_of_bytes(Words numbers, uint32_t inputs) {
  return (Ints)_mm256_maddubs_epi16((__m256i)numbers, _mm256_set1_epi32(static_cast<int32_t>(inputs)));
}
inline Ints add_halves(Ints a, Ints b) {
  return (Ints)_mm256_add_epi16((__m256i)a, (__m256i)b);
}
inline Ints pairs_of_halves(Ints a, Ints b) {
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline Ints even_bytes(Ints x) {
  return (Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
}
inline Ints odd_bytes(Ints x) {
  return (Ints)_mm256_srai_epi16((__m256i)x, 8);
}
#endif
inline Ints sums_of_halves(Ints x) {
  return pairs_of_halves(x, Ints{} + 0x00010001);
}

// Products of two bytes are at most 2 * 127 * the largest number; 16 bits hold the sum of so many.
template <int kBits>
struct Sums {
  static constexpr int kMost = 32767 / (2 * 127 * ((1 << kBits) - 1));
  Ints whole, halves;

  Sums() = default;
  explicit Sums(int32_t first) : whole(Ints{} + first) {}
  void add(Words numbers, uint32_t inputs, int word) {
    const Ints products = pairs_of_bytes(numbers, inputs);
    if (word % kMost == 0) {
      if (word) whole += sums_of_halves(halves);
      halves = products;
    } else {
      halves = add_halves(halves, products);
      asm("" : "+v"(halves));  // else GCC first makes all products of a segment, in memory, and then their sums
    }
  }
  Ints flush() const { return whole + sums_of_halves(halves); }
};
// Numbers of 8 bits get a sign, by which 128 is subtracted: with it the products of two bytes fit 16 bits as factors only.
template <>
struct Sums<8> {
  Ints whole;

  Sums() = default;
  explicit Sums(int32_t first) : whole(Ints{} + first) {}
  void add(Words numbers, uint32_t inputs, int) {
    const Ints w = (Ints)(numbers ^ 0x80808080u), x = Ints{} + static_cast<int32_t>(inputs);
    whole += pairs_of_halves(even_bytes(w), even_bytes(x)) + pairs_of_halves(odd_bytes(w), odd_bytes(x));
  }
  Ints flush() const { return whole; }
};
#else
constexpr bool kBeginsWithSecond = true;
template <int kBits>
struct Sums {
  Ints whole;

  Sums() = default;
  explicit Sums(int32_t first) : whole(Ints{} + first) {}
  void add(Words numbers, uint32_t inputs, int) {
    for (int i = 0; i < 4; ++i) {
      whole += (Ints)((numbers >> (8 * i)) & 0xff) * static_cast<int32_t>(static_cast<int8_t>(inputs >> (8 * i)));
    }
  }
  Ints flush() const { return whole; }
};
#endif

// ---- weights ----

// The numbers of a vector of columns in a segment: `word(i)` has those of inputs 4 i to 4 i + 3.
template <class Format>
struct SegmentNumbers {
  const uint8_t* words;  // of the vector's first column

  Words word(int index) const {
    if constexpr (!Format::kHasNibbles) return load_words(words + index * (kPanel * 4));
    const Words pair = load_words(words + index / 2 * (kPanel * 4));
    const Words low = (index % 2 ? pair >> 4 : pair) & 0x0f0f0f0fu;
    if constexpr (!Format::kHasHighBits) return low;
    constexpr int kHigh = Format::kBits - 4;
    constexpr uint32_t kMask = ((1u << kHigh) - 1) * 0x10101010u;
    const Words all = load_words(words + Format::kNibbleWords * (kPanel * 4));
    const int up = 4 - kHigh * index;
    return low | ((up > 0 ? all << up : all >> -up) & kMask);
  }
};

inline Floats scales_at(const uint8_t* p, SegmentScales type) {
  switch (type) {
    case SegmentScales::kFloat32:
      return load(reinterpret_cast<const float*>(p));
    case SegmentScales::kBFloat16:
      return load(reinterpret_cast<const BFloat16*>(p));
    default:
      return load(reinterpret_cast<const Float16*>(p));
  }
}

// a * b + c, rounded once by every processor.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return multiply_add(a, b, c);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Sums of kRows rows over a panel's kColumnVectors vectors of columns, from `first_vector` on, to `out` [kRows, kVectors].
template <class Format, int kRows, int kColumnVectors, class Ahead>
__attribute__((noinline, flatten)) void segment_tile(const uint8_t* panel, const SegmentLayout& layout, RoundedRows rows,
                                                     int first_vector, Floats* out, Ahead ahead) {
  constexpr int kAll = kRows * kColumnVectors, kSegment = Format::kSegment;
  constexpr bool kSigned = Format::kBits == 8 && kSignsBytes, kCorrects = Format::kZeros == Zeros::kMiddle && !kSigned;
  Floats total[kAll] = {};
  const int64_t size = segment_scale_bytes(layout.scales);
  const bool has_levels = layout.scales == SegmentScales::kTwoLevels;
  const int64_t segments = rows.segments;
  for (int64_t first = 0; first < segments; first += layout.segments_per_block, panel += layout.block_bytes) {
    Floats scales[kColumnVectors], others[kColumnVectors];
    for (int v = 0; v < kColumnVectors; ++v) {
      const int64_t column = (first_vector + v) * kLanes;
      scales[v] = scales_at(panel + column * size, layout.scales);
      if constexpr (Format::kZeros == Zeros::kSmallest) {
        others[v] = scales_at(panel + (kPanel + column) * size, layout.scales);
      } else if constexpr (Format::kZeros == Zeros::kPoints) {
        const Ints zeros = widen_unsigned(panel + kPanel * size + column);
        others[v] = -to_floats(kSigned ? zeros - Format::kMiddle : zeros);
      }
    }
    const int64_t rest = segments - first;
    const int64_t count = rest < layout.segments_per_block ? rest : layout.segments_per_block;
    const uint8_t* segment = panel + layout.header_bytes;
    for (int64_t at = 0; at < count; ++at, segment += layout.segment_bytes, rows.go_on(kSegment)) {
      ahead.prefetch();
      const uint8_t* words = segment + layout.segment_header_bytes + first_vector * kLanes * 4;
      alignas(64) Sums<Format::kBits> sums[kAll];
      unrolled<kAll>([&](auto i) __attribute__((always_inline)) {
        sums[i] = Sums<Format::kBits>(kCorrects && kBeginsWithSecond ? rows.seconds[i / kColumnVectors] : 0);
      });
      unrolled<Format::kWords>([&](auto word) __attribute__((always_inline)) {
        Words numbers[kColumnVectors];
        unrolled<kColumnVectors>([&](auto v) __attribute__((always_inline)) {
          numbers[v] = SegmentNumbers<Format>{words + v * kLanes * 4}.word(word);
        });
        unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
          const uint32_t inputs = word_at(rows.integers + r * kSegment + word * 4);
          unrolled<kColumnVectors>([&](auto v) __attribute__((always_inline)) {
            sums[r * kColumnVectors + v].add(numbers[v], inputs, word);
          });
        });
      });
      Floats own[kColumnVectors];
      for (int v = 0; v < kColumnVectors; ++v) {
        own[v] = scales[v];
        if (has_levels) own[v] = own[v] * to_floats(widen(reinterpret_cast<const int8_t*>(segment) + (first_vector + v) * kLanes));
      }
      unrolled<kAll>([&](auto i) __attribute__((always_inline)) {
        constexpr int v = i % kColumnVectors, r = i / kColumnVectors;
        Floats sum = to_floats(kCorrects && !kBeginsWithSecond ? sums[i].flush() + rows.seconds[r] : sums[i].flush());
        if constexpr (Format::kZeros == Zeros::kPoints) {
          const float second = bits_as<float>(rows.seconds[r]);
          sum = fused_multiply_add(others[v], broadcast(second), sum);
        }
        total[i] = fused_multiply_add(sum, own[v] * rows.scales[r], total[i]);
      });
      if constexpr (Format::kZeros == Zeros::kSmallest) {
        for (int v = 0; v < kColumnVectors; ++v) {
          Floats smallest = others[v];
          if (has_levels) {
            const uint8_t* levels = segment + kPanel + (first_vector + v) * kLanes;
            smallest = smallest * to_floats(widen(reinterpret_cast<const int8_t*>(levels)));
          }
          for (int r = 0; r < kRows; ++r) {
            const float second = bits_as<float>(rows.seconds[r]);
            total[r * kColumnVectors + v] = fused_multiply_add(smallest, broadcast(second), total[r * kColumnVectors + v]);
          }
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumnVectors; ++v) out[r * kVectors + first_vector + v] = total[r * kColumnVectors + v];
  }
}

}  // namespace llmstack
