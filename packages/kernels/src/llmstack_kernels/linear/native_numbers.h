// Numbers of 4 and 8 bits in words of 32 bits, and the formats that say what they stand for.
//
// A word holds the numbers of a column's next 8 or 4 inputs. Even inputs lie in its lower half and odd ones in its upper,
// so that an instruction that takes inputs in pairs finds both where it wants them.
#pragma once

#include "native_widening.h"

namespace llmstack {

constexpr int shift_of(int bits, int input) {
  return 16 * (input % 2) + bits * (input / 2);
}

template <int kBits>
inline Words number_at(Words words, int input) {
  return (words >> shift_of(kBits, input)) & ((1u << kBits) - 1);
}

// A number with a sign, times 2^(32 - kBits): it stays at the top of a word, which saves shifting it down.
template <int kBits>
inline Floats signed_number_at(Words words, int input) {
  const int up = 32 - kBits - shift_of(kBits, input);
  if (up) words = words << up;
  if (up + kBits < 32) words = words & ~0u << (32 - kBits);
  return to_floats((Ints)words);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same by a shuffle in place of a shift and a mask. Four numbers of 4 bits have the first step in common.
template <int kBits>
inline Floats shuffled_number_at(Words words, int input) {
  const int shift = shift_of(kBits, input);
  if (kBits == 8 && shift % 24 == 0) return signed_number_at<8>(words, input);  // one instruction, too
  if (kBits == 4) words = (shift % 8 ? words : words << 4) & 0xf0f0f0f0u;
  const Ints order = Ints{0, 4, 8, 12, 0, 4, 8, 12} + shift / 8;  // each word's byte, below which are zeros
  return to_floats(bits_as<Ints>(_mm256_shuffle_epi8(bits_as<__m256i>(words), bits_as<__m256i>(order << 24 | 0x808080))));
}
#endif

template <int kBits>
constexpr float kSignedFactor = kBits == 8 ? 0x1p24f : 0x1p28f;

#if defined(__AVX512BF16__)
// Two inputs' weights for an instruction that takes pairs. They have so few digits that bfloat16 holds them.
inline __m512i pair_of(Floats even, Floats odd) {
  return bits_as<__m512i>(bits_as<Words>(even) >> 16 | bits_as<Words>(odd));
}
#endif

// ---- formats ----
//
// Each has the bits of a number, the bytes of a zero point, and a factor that its values are multiplied by. `Numbers` are
// those of kColumnVectors vectors of columns within a group.

// Numbers with a sign.
template <int kNumberBits>
struct Signed {
  static constexpr int kBits = kNumberBits, kZeroBytes = 0;
  static constexpr float kFactor = kSignedFactor<kBits>;

  template <int kColumnVectors>
  struct Numbers {
    Numbers(const void*, int64_t, int) {}
    Floats number(Words words, int input, int) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
      // Few rows, which have registers for the order of the bytes.
      if constexpr (kColumnVectors > kTileVectors) return shuffled_number_at<kBits>(words, input);
#endif
      return signed_number_at<kBits>(words, input);
    }
  };
};

// Numbers with a sign less a zero point, which is an integer of 8 bits.
template <int kNumberBits>
struct Offset {
  static constexpr int kBits = kNumberBits, kZeroBytes = 1;
  static constexpr float kFactor = kSignedFactor<kBits>;

  template <int kColumnVectors>
  struct Numbers {
    Floats zeros[kColumnVectors];

    Numbers(const void* extra, int64_t group, int first_vector) {
      const int8_t* own = static_cast<const int8_t*>(extra) + group * kPanel + first_vector * kLanes;
      for (int v = 0; v < kColumnVectors; ++v) zeros[v] = to_floats(widen(own + v * kLanes)) * kFactor;
    }
    Floats number(Words words, int input, int v) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
      if constexpr (kBits == 8 || kColumnVectors > kTileVectors) return shuffled_number_at<kBits>(words, input) - zeros[v];
#endif
      return signed_number_at<kBits>(words, input) - zeros[v];
    }
  };
};

// Numbers without a sign less a zero point, which is a float.
template <int kNumberBits>
struct Shifted {
  static constexpr int kBits = kNumberBits, kZeroBytes = 4;
  static constexpr float kFactor = 1.0f;

  template <int kColumnVectors>
  struct Numbers {
    Floats zeros[kColumnVectors];

    Numbers(const void* extra, int64_t group, int first_vector) {
      const float* own = static_cast<const float*>(extra) + group * kPanel + first_vector * kLanes;
      for (int v = 0; v < kColumnVectors; ++v) zeros[v] = load(own + v * kLanes);
    }
    Floats number(Words words, int input, int v) const {
      return to_floats((Ints)number_at<kBits>(words, input)) - zeros[v];
    }
  };
};

// float8 e4m3. In float32 the same bits have an exponent that is 120 smaller, of subnormal numbers too.
struct Float8 {
  static constexpr int kBits = 8, kZeroBytes = 0;
  static constexpr float kFactor = 1.0f;

  template <int kColumnVectors>
  struct Numbers {
    Numbers(const void*, int64_t, int) {}
    Floats number(Words words, int input, int) const {
      const Ints at_top = (Ints)(words << (24 - shift_of(kBits, input)));
      return bits_as<Floats>((Words)(at_top >> 4) & 0x87f00000u) * 0x1p120f;
    }
  };
};

// Numbers that name the entries of a table of 16 floats.
struct Named {
  static constexpr int kBits = 4, kZeroBytes = 0;
  static constexpr float kFactor = 1.0f;

  template <int kColumnVectors>
  struct Numbers : Table {
    Numbers(const void* extra, int64_t, int) : Table{static_cast<const float*>(extra)} {}
    Floats number(Words words, int input, int) const { return look_up(words >> shift_of(kBits, input)); }
  };
};

// ---- weights ----

// The weights of a part of a step as products of W take them: one input's, or those of a pair. For tiles of kRows rows.
template <class Format, class W, int kColumnVectors, int kRows>
struct Weights : Format::template Numbers<kColumnVectors> {
  using Format::template Numbers<kColumnVectors>::Numbers;

  auto part(Words words, int index, int v) const {
#if defined(__AVX512BF16__)
    if constexpr (kStep<W> == 2) {
      return pair_of(this->number(words, 2 * index, v), this->number(words, 2 * index + 1, v));
    } else
#endif
    return this->number(words, index, v);
  }
};

#if defined(__AVX512F__)
// A number less its zero point is one of those from -16 to 15, which a table has. The indices of four inputs are computed
// together, in the bytes of a word. More rows have no registers for the table.
template <int kColumnVectors, int kRows>
  requires(kRows <= 3)
struct Weights<Offset<4>, float, kColumnVectors, kRows> {
  __m512i offsets[kColumnVectors];
  __m512 low, high;

  Weights(const void* extra, int64_t group, int first_vector) {
    const int8_t* own = static_cast<const int8_t*>(extra) + group * kPanel + first_vector * kLanes;
    for (int v = 0; v < kColumnVectors; ++v) offsets[v] = (__m512i)((Words)(8 - widen(own + v * kLanes)) * 0x01010101u);
    Ints lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    low = (__m512)(to_floats(lanes - 16) * Offset<4>::kFactor);
    high = (__m512)(to_floats(lanes) * Offset<4>::kFactor);
  }
  Floats part(Words words, int index, int v) const {
    constexpr int kAndXor = 0x6a;  // (first & second) ^ third
    const int shift = shift_of(4, index);
    const __m512i numbers = _mm512_ternarylogic_epi32((__m512i)(words >> (shift % 8)), _mm512_set1_epi8(15),
                                                      _mm512_set1_epi8(8), kAndXor);
    const Words indices = (Words)_mm512_add_epi8(numbers, offsets[v]);
    return (Floats)_mm512_permutex2var_ps(low, (__m512i)(indices >> (shift / 8 * 8)), high);
  }
};
#endif

#if defined(__AVX512BF16__)
// 32 numbers of bfloat16, named by the lowest five bits of each half of a word.
struct PairTable {
  __m512i entries;

  template <class Entry>
  explicit PairTable(const Entry& entry) {
    uint16_t bits[32];
    for (int i = 0; i < 32; ++i) bits[i] = to_bfloat16(entry(i)).bits;
    entries = _mm512_loadu_si512(bits);
  }
  __m512i look_up(__m512i indices) const { return _mm512_permutexvar_epi16(indices, entries); }
};

// The fifth bit belongs to the next number, so the halves of the table are alike.
template <int kColumnVectors, int kRows>
struct Weights<Signed<4>, BFloat16, kColumnVectors, kRows> {
  PairTable table;

  Weights(const void*, int64_t, int)
      : table([](int i) { return Signed<4>::kFactor * static_cast<float>((i & 7) - (i & 8)); }) {}
  __m512i part(Words words, int index, int) const { return table.look_up((__m512i)(words >> (4 * index))); }
};

// The table has the numbers from -16 to 15, which a number less its zero point is one of. The indices of two parts are
// computed together, in the bytes of a word: a shift is all that the second one takes.
template <int kColumnVectors, int kRows>
struct Weights<Offset<4>, BFloat16, kColumnVectors, kRows> {
  __m512i offsets[kColumnVectors];
  PairTable table;

  Weights(const void* extra, int64_t group, int first_vector)
      : table([](int i) { return Offset<4>::kFactor * static_cast<float>(i - 16); }) {
    const int8_t* own = static_cast<const int8_t*>(extra) + group * kPanel + first_vector * kLanes;
    for (int v = 0; v < kColumnVectors; ++v) offsets[v] = (__m512i)((Words)(8 - widen(own + v * kLanes)) * 0x01010101u);
  }
  __m512i part(Words words, int index, int v) const {
    constexpr int kAndXor = 0x6a;  // (first & second) ^ third
    const __m512i numbers = _mm512_ternarylogic_epi32((__m512i)(words >> (4 * (index % 2))), _mm512_set1_epi8(15),
                                                      _mm512_set1_epi8(8), kAndXor);
    const __m512i indices = _mm512_add_epi8(numbers, offsets[v]);
    return table.look_up(index < 2 ? indices : _mm512_srli_epi32(indices, 8));
  }
};

// bfloat16 has the same bits, too. Subnormal numbers are looked up, since products take them for zeros.
template <int kColumnVectors, int kRows>
struct Weights<Float8, BFloat16, kColumnVectors, kRows> {
  PairTable subnormals;

  Weights(const void*, int64_t, int) : subnormals([](int i) { return static_cast<float>(i & 7) * 0x1p-9f; }) {}
  __m512i part(Words words, int index, int) const {
    const __m512i at_top = index ? (__m512i)words : _mm512_slli_epi16((__m512i)words, 8);
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(at_top, 4), _mm512_set1_epi16(0x07f0));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(at_top, _mm512_set1_epi16(0x7800));
    const __m512i value =
        _mm512_mask_permutexvar_epi16(normal, is_subnormal, _mm512_srli_epi16(magnitude, 4), subnormals.entries);
    constexpr int kAndOr = 0xea;  // (first & second) | third
    return _mm512_ternarylogic_epi32(at_top, _mm512_set1_epi16(static_cast<short>(0x8000)), value, kAndOr);
  }
};
#endif

}  // namespace llmstack
