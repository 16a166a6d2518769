// Weights of checkpoints, packed into panels of segments: from numbers and scales, or from the blocks of a GGUF file.

#include "native_segment_formats.h"
#include "native.h"

namespace llmstack {
namespace {

// Where a column's scales and numbers go.
template <class Format>
struct ColumnWriter {
  uint8_t* panel;
  const SegmentLayout& layout;
  int64_t column;

  uint8_t* block(int64_t segment) const { return panel + segment / layout.segments_per_block * layout.block_bytes; }
  uint8_t* segment_start(int64_t segment) const {
    return block(segment) + layout.header_bytes + segment % layout.segments_per_block * layout.segment_bytes;
  }
  // The block's scale, or what follows the scales of all columns: its zero point or smallest value.
  void put_scale(int64_t segment, const void* value) const {
    const int64_t size = segment_scale_bytes(layout.scales);
    std::memcpy(block(segment) + column * size, value, size);
  }
  void put_other(int64_t segment, const void* value) const {
    const int64_t size = segment_scale_bytes(layout.scales), own = Format::kZeros == Zeros::kPoints ? 1 : size;
    std::memcpy(block(segment) + kPanel * size + column * own, value, own);
  }
  // The integer that the block's scale is multiplied by, and that of the smallest value.
  void put_level(int64_t segment, uint8_t level, int place = 0) const { segment_start(segment)[place * kPanel + column] = level; }

  void put_numbers(int64_t segment, const uint8_t* numbers) const {
    uint8_t* words = segment_start(segment) + layout.segment_header_bytes + column * 4;
    const auto put = [&](int at, uint32_t word) { std::memcpy(words + at * (kPanel * 4), &word, 4); };
    const auto four = [&](int index) {
      uint32_t word;
      std::memcpy(&word, numbers + 4 * index, 4);
      return word;
    };
    if constexpr (!Format::kHasNibbles) {
      for (int i = 0; i < Format::kWords; ++i) put(i, four(i));
    } else {
      for (int i = 0; i < Format::kNibbleWords; ++i) {
        put(i, (four(2 * i) & 0x0f0f0f0fu) | (four(2 * i + 1) & 0x0f0f0f0fu) << 4);
      }
    }
    if constexpr (Format::kHasHighBits) {
      constexpr int kHigh = Format::kBits - 4;
      uint32_t high = 0;
      for (int i = 0; i < Format::kWords; ++i) high |= (four(i) >> 4 & ((1u << kHigh) - 1) * 0x01010101u) << (kHigh * i);
      put(Format::kNibbleWords, high);
    }
  }
};

// Calls `work(writer, output, segment)` for every column of every panel, `step` segments of all columns after one another,
// so that what is written stays in the second-level cache.
template <class Format, class Work>
void for_each_column(uint8_t* packed, const SegmentLayout& layout, int64_t segments, int64_t out_features, int64_t step,
                     const Work& work) {
  const int64_t bytes = layout.panel_bytes(segments);
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    uint8_t* own = packed + panel * bytes;
    const int64_t columns = columns_of(panel, out_features);
    // What no column has is zeros: the rest of the last panel, and of the last block.
    if (columns < kPanel || segments % layout.segments_per_block) std::memset(own, 0, bytes);
    for (int64_t segment = 0; segment < segments; segment += step) {
      for (int64_t column = 0; column < columns; ++column) {
        work(ColumnWriter<Format>{own, layout, column}, panel * kPanel + column, segment);
      }
    }
  });
}

struct NumbersAndScales {
  const uint8_t* numbers;  // [out_features, in_features]
  const uint8_t* scales;   // [out_features, groups]
  const uint8_t* zeros;    // the same, or null
  int64_t in_features, out_features, groups;
};

template <class Format>
void pack_numbers(const NumbersAndScales& weight, const SegmentLayout& layout, uint8_t* packed) {
  constexpr int64_t kInputs = Format::kSegment;
  const int64_t segments = (weight.in_features + kInputs - 1) / kInputs, size = segment_scale_bytes(layout.scales);
  for_each_column<Format>(packed, layout, segments, weight.out_features, 1, [&](auto writer, int64_t output, int64_t segment) {
    if (segment % layout.segments_per_block == 0) {
      const int64_t at = output * weight.groups + segment / layout.segments_per_block;
      writer.put_scale(segment, weight.scales + at * size);
      if constexpr (Format::kZeros == Zeros::kPoints) writer.put_other(segment, weight.zeros + at);
    }
    const uint8_t* numbers = weight.numbers + output * weight.in_features + segment * kInputs;
    const int64_t rest = weight.in_features - segment * kInputs;
    if (rest >= kInputs) return writer.put_numbers(segment, numbers);
    uint8_t padded[kInputs] = {};
    std::memcpy(padded, numbers, rest);
    writer.put_numbers(segment, padded);
  });
}

// ---- blocks of GGUF files, as in ggml-common.h ----

inline void low_then_high(const uint8_t* bytes, int count, uint8_t* numbers) {
  for (int i = 0; i < count; ++i) numbers[i] = bytes[i] & 15, numbers[count + i] = bytes[i] >> 4;
}

inline uint16_t negated_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half ^ 0x8000;
}

template <class Writer>
void put_negated(const Writer& writer, int64_t segment, const uint8_t* half) {
  const uint16_t value = negated_half(half);
  writer.put_other(segment, &value);
}

// Four or five bits of 32 inputs, with a smallest value in the odd formats.
template <int kNumberBits, bool kHasSmallest>
struct PlainBlock {
  using Format = SegmentFormat<kNumberBits, kHasSmallest ? Zeros::kSmallest : Zeros::kMiddle>;
  static constexpr int kHeader = kHasSmallest ? 4 : 2, kFifth = kNumberBits == 5 ? 4 : 0;
  static constexpr int kSegments = 1, kBytes = kHeader + kFifth + 16;
  static constexpr SegmentScales kScales = SegmentScales::kFloat16;

  static void read(const uint8_t* block, const ColumnWriter<Format>& writer, int64_t segment) {
    writer.put_scale(segment, block);
    if (kHasSmallest) writer.put_other(segment, block + 2);
    uint8_t numbers[32];
    low_then_high(block + kHeader + kFifth, 16, numbers);
    if constexpr (kNumberBits == 5) {
      for (int i = 0; i < 32; ++i) numbers[i] |= (block[kHeader + i / 8] >> (i % 8) & 1) << 4;
    }
    writer.put_numbers(segment, numbers);
  }
};

struct ByteBlock {
  using Format = SegmentFormat<8, Zeros::kMiddle>;
  static constexpr int kSegments = 1, kBytes = 34;
  static constexpr SegmentScales kScales = SegmentScales::kFloat16;

  static void read(const uint8_t* block, const ColumnWriter<Format>& writer, int64_t segment) {
    writer.put_scale(segment, block);
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
  static constexpr SegmentScales kScales = SegmentScales::kTwoLevels;

  static void read(const uint8_t* block, const ColumnWriter<Format>& writer, int64_t segment) {
    writer.put_scale(segment, block);
    put_negated(writer, segment, block + 2);
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
        for (int i = 0; i < 64; ++i) numbers[i] |= (block[16 + i % 32] >> (2 * pair + i / 32) & 1) << 4;
      }
      writer.put_numbers(segment + 2 * pair, numbers);
      writer.put_numbers(segment + 2 * pair + 1, numbers + 32);
    }
  }
};

// Q6_K: sixteen segments of 16, with integers of eight bits.
struct SixBitBlock {
  using Format = SegmentFormat<6, Zeros::kMiddle, 16>;
  static constexpr int kSegments = 16, kBytes = 210;
  static constexpr SegmentScales kScales = SegmentScales::kTwoLevels;

  static void read(const uint8_t* block, const ColumnWriter<Format>& writer, int64_t segment) {
    writer.put_scale(segment, block + 208);
    for (int i = 0; i < kSegments; ++i) writer.put_level(segment + i, block[192 + i]);
    uint8_t numbers[128];
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      low_then_high(low, 64, numbers);
      for (int i = 0; i < 128; ++i) numbers[i] |= (high[i % 32] >> (i / 32 * 2) & 3) << 4;
      for (int i = 0; i < 8; ++i) writer.put_numbers(segment + 8 * half + i, numbers + 16 * i);
    }
  }
};

template <class Block>
void pack_blocks(const uint8_t* const* rows, int64_t in_features, int64_t out_features, uint8_t* packed) {
  using Format = typename Block::Format;
  const SegmentLayout layout = SegmentLayout::of<Format>(Block::kScales, Block::kSegments);
  const int64_t segments = in_features / Format::kSegment;
  for_each_column<Format>(packed, layout, segments, out_features, Block::kSegments,
                          [&](auto writer, int64_t output, int64_t segment) {
    Block::read(rows[output] + segment / Block::kSegments * Block::kBytes, writer, segment);
  });
}

template <class... Formats>
void pack_as(SegmentFormats<Formats...>, int64_t format, const NumbersAndScales& weight, SegmentScales scales,
             int64_t segments_per_block, uint8_t* packed) {
  using Pack = void (*)(const NumbersAndScales&, const SegmentLayout&, uint8_t*);
  static constexpr Pack kPack[] = {&pack_numbers<Formats>...};
  kPack[format](weight, segment_kind(format).layout(scales, segments_per_block), packed);
}

// In the order of the names in `native_segments.py`.
using PackBlocks = void (*)(const uint8_t* const* rows, int64_t in_features, int64_t out_features, uint8_t* packed);
constexpr PackBlocks kPackBlocks[] = {
    &pack_blocks<PlainBlock<4, false>>, &pack_blocks<PlainBlock<4, true>>, &pack_blocks<PlainBlock<5, false>>,
    &pack_blocks<PlainBlock<5, true>>,  &pack_blocks<ByteBlock>,           &pack_blocks<KBlock<4>>,
    &pack_blocks<KBlock<5>>,            &pack_blocks<SixBitBlock>,
};

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_segments_panel_bytes(int64_t format, int64_t scales, int64_t segments_per_block,
                                              int64_t in_features, int64_t* bytes) {
  const llmstack::SegmentKind& kind = llmstack::segment_kind(format);
  const auto layout = kind.layout(static_cast<llmstack::SegmentScales>(scales), segments_per_block);
  *bytes = layout.panel_bytes((in_features + kind.inputs - 1) / kind.inputs);
}

extern "C" void llmstack_linear_pack_segments(const uint8_t* numbers, const uint8_t* scales, const uint8_t* zeros,
                                              int64_t format, int64_t scale_type, int64_t segments_per_block,
                                              int64_t in_features, int64_t out_features, int64_t groups, uint8_t* packed) {
  llmstack::pack_as(llmstack::AllSegmentFormats(), format, {numbers, scales, zeros, in_features, out_features, groups},
                    static_cast<llmstack::SegmentScales>(scale_type), segments_per_block, packed);
}

// `rows` has the address of each output's blocks.
extern "C" void llmstack_linear_pack_blocks(const uint8_t* const* rows, int64_t type, int64_t in_features,
                                            int64_t out_features, uint8_t* packed) {
  llmstack::kPackBlocks[type](rows, in_features, out_features, packed);
}
