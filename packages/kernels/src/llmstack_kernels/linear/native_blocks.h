// Blocks of GGUF files, as in ggml-common.h: `read` hands their scales and numbers to a writer.
#pragma once

#include "native_segment_formats.h"

namespace llmstack {

// Eight bytes at once. (GCC takes short loops over bytes one by one, at a fifth of the speed.)
constexpr uint64_t kEveryByte = 0x0101010101010101u;
inline uint64_t eight_at(const uint8_t* p) {
  uint64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}
inline void put_eight(uint8_t* p, uint64_t bytes) {
  std::memcpy(p, &bytes, sizeof(bytes));
}

// The low four bits of all bytes, then the high ones.
inline void low_then_high(const uint8_t* bytes, int count, uint8_t* numbers) {
  for (int i = 0; i < count; i += 8) {
    const uint64_t both = eight_at(bytes + i);
    put_eight(numbers + i, both & (15 * kEveryByte));
    put_eight(numbers + count + i, (both >> 4) & (15 * kEveryByte));
  }
}

// Adds higher bits to eight numbers: of each byte those from `shift` on, as many as `mask` has.
inline void add_high_bits(uint8_t* numbers, const uint8_t* bytes, int shift, uint64_t mask) {
  put_eight(numbers, eight_at(numbers) | ((eight_at(bytes) >> shift) & (mask * kEveryByte)) << 4);
}

// Adds a fifth bit to eight numbers: those of a byte. A byte of the product keeps the bit that is its own.
inline void add_fifth_bits(uint8_t* numbers, uint8_t bits) {
  const uint64_t own = (bits * kEveryByte) & 0x8040201008040201u;
  put_eight(numbers, eight_at(numbers) | ((own + 0x7f * kEveryByte) & (0x80 * kEveryByte)) >> 3);
}

inline uint16_t negated_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half ^ 0x8000;
}

template <class Writer>
void put_negated(Writer& writer, const uint8_t* half) {
  const uint16_t value = negated_half(half);
  writer.put_other(&value);
}

// Four or five bits of 32 inputs, with a smallest value in the odd formats.
template <int kNumberBits, bool kHasSmallest>
struct PlainBlock {
  using Format = SegmentFormat<kNumberBits, kHasSmallest ? Zeros::kSmallest : Zeros::kMiddle>;
  static constexpr int kHeader = kHasSmallest ? 4 : 2, kFifth = kNumberBits == 5 ? 4 : 0;
  static constexpr int kSegments = 1, kBytes = kHeader + kFifth + 16, kFirstScale = 0, kLastScale = kHeader - 2;
  static constexpr SegmentScales kScales = SegmentScales::kFloat16;

  template <class Writer>
  static void read(const uint8_t* block, Writer& writer, int64_t segment) {
    writer.put_scale(block);
    if (kHasSmallest) writer.put_other(block + 2);
    uint8_t numbers[32];
    low_then_high(block + kHeader + kFifth, 16, numbers);
    if constexpr (kNumberBits == 5) {
      for (int i = 0; i < 4; ++i) add_fifth_bits(numbers + 8 * i, block[kHeader + i]);
    }
    writer.put_numbers(segment, numbers);
  }
};

struct ByteBlock {
  using Format = SegmentFormat<8, Zeros::kMiddle>;
  static constexpr int kSegments = 1, kBytes = 34, kFirstScale = 0, kLastScale = 0;
  static constexpr SegmentScales kScales = SegmentScales::kFloat16;

  template <class Writer>
  static void read(const uint8_t* block, Writer& writer, int64_t segment) {
    writer.put_scale(block);
    uint8_t numbers[32];
    for (int i = 0; i < 32; ++i) numbers[i] = block[2 + i] ^ 128;
    writer.put_numbers(segment, numbers);
  }
};

// Q4_K and Q5_K: eight segments, with integers of six bits in twelve bytes.
template <int kNumberBits>
struct KBlock {
  using Format = SegmentFormat<kNumberBits, Zeros::kSmallest>;
  static constexpr int kFifth = kNumberBits == 5 ? 32 : 0, kSegments = 8, kBytes = 16 + kFifth + 128;
  static constexpr int kFirstScale = 0, kLastScale = 2;
  static constexpr SegmentScales kScales = SegmentScales::kTwoLevels;

  template <class Writer>
  static void read(const uint8_t* block, Writer& writer, int64_t segment) {
    writer.put_scale(block);
    put_negated(writer, block + 2);
    const uint8_t* packed = block + 4;
    for (int i = 0; i < 4; ++i) {
      writer.put_level(segment + i, packed[i] & 63);
      writer.put_level(segment + i, packed[4 + i] & 63, 1);
      writer.put_level(segment + 4 + i, (packed[8 + i] & 15) | packed[i] >> 6 << 4);
      writer.put_level(segment + 4 + i, packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4, 1);
    }
    uint8_t numbers[64];
    for (int pair = 0; pair < 4; ++pair) {
      low_then_high(block + 16 + kFifth + pair * 32, 32, numbers);
      if constexpr (kNumberBits == 5) {
        for (int i = 0; i < 64; i += 8) add_high_bits(numbers + i, block + 16 + i % 32, 2 * pair + i / 32, 1);
      }
      writer.put_numbers(segment + 2 * pair, numbers);
      writer.put_numbers(segment + 2 * pair + 1, numbers + 32);
    }
  }
};

// Q6_K: sixteen segments of 16, with integers of eight bits.
struct SixBitBlock {
  using Format = SegmentFormat<6, Zeros::kMiddle, 16>;
  static constexpr int kSegments = 16, kBytes = 210, kFirstScale = 208, kLastScale = 208;
  static constexpr SegmentScales kScales = SegmentScales::kTwoLevels;

  template <class Writer>
  static void read(const uint8_t* block, Writer& writer, int64_t segment) {
    writer.put_scale(block + 208);
    for (int i = 0; i < kSegments; ++i) writer.put_level(segment + i, block[192 + i]);
    uint8_t numbers[128];
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      low_then_high(low, 64, numbers);
      for (int i = 0; i < 128; i += 8) add_high_bits(numbers + i, high + i % 32, i / 32 * 2, 3);
      for (int i = 0; i < 8; ++i) writer.put_numbers(segment + 8 * half + i, numbers + 16 * i);
    }
  }
};

// All types, in the order of `BLOCK_TYPES` in Python.
template <class... Types>
struct Blocks {};
using AllBlocks = Blocks<PlainBlock<4, false>, PlainBlock<4, true>, PlainBlock<5, false>, PlainBlock<5, true>, ByteBlock,
                         KBlock<4>, KBlock<5>, SixBitBlock>;

// Inputs of a block.
template <class Block>
constexpr int64_t kBlockInputs = Block::kSegments * Block::Format::kSegment;

// Numbers of one block as floats: scale * (number - middle), or scale * number + smallest, each rounded as it is computed.
template <class Block>
struct BlockWriter {
  using Format = typename Block::Format;
  static constexpr bool kHasLevels = Block::kScales == SegmentScales::kTwoLevels;
  float* numbers;
  float scale = 0, other = 0, levels[2][Block::kSegments] = {};

  static float half_at(const void* p) {
    Float16 half;
    std::memcpy(&half, p, sizeof(half));
    return to_float(half);
  }
  void put_scale(const void* value) { scale = half_at(value); }
  void put_other(const void* value) { other = half_at(value); }
  void put_level(int64_t segment, uint8_t level, int place = 0) {
    levels[place][segment] = static_cast<int8_t>(level);
  }
  void put_numbers(int64_t segment, const uint8_t* own_numbers) {
    const float own = kHasLevels ? scale * levels[0][segment] : scale;
    const float smallest = kHasLevels ? other * levels[1][segment] : other;
    constexpr int kMiddle = Format::kZeros == Zeros::kMiddle ? Format::kMiddle : 0;
    for (int i = 0; i < Format::kSegment; ++i) {
      numbers[segment * Format::kSegment + i] = own * static_cast<float>(own_numbers[i] - kMiddle) + smallest;
    }
  }
};

}  // namespace llmstack
