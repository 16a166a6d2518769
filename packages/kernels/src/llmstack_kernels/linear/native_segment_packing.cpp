// Weights of checkpoints, packed into panels of segments: from numbers and scales, or from the blocks of a GGUF file.

#include <atomic>

#include "native.h"
#include "native_blocks.h"

namespace llmstack {
namespace {

// Where a column's scales and numbers go.
template <class Format>
struct ColumnWriter {
  uint8_t* block;
  const SegmentLayout& layout;
  int64_t first, column;  // `first` is the segment that the block begins with

  uint8_t* segment_start(int64_t segment) const {
    return block + layout.header_bytes + (segment - first) * layout.segment_bytes;
  }
  // The block's scale, or what follows the scales of all columns: its zero point or smallest value.
  void put_scale(const void* value) const {
    const int64_t size = segment_scale_bytes(layout.scales);
    std::memcpy(block + column * size, value, size);
  }
  void put_other(const void* value) const {
    const int64_t size = segment_scale_bytes(layout.scales), own = Format::kZeros == Zeros::kPoints ? 1 : size;
    std::memcpy(block + kPanel * size + column * own, value, own);
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
// so that what is written stays in the caches. A block has whole steps.
template <class Format, class Work>
void for_each_column(uint8_t* packed, const SegmentLayout& layout, int64_t segments, int64_t out_features, int64_t step,
                     const Work& work) {
  const int64_t bytes = layout.panel_bytes(segments);
  for_each_chunk(num_panels(out_features), [&](int64_t panel) {
    uint8_t* own = packed + panel * bytes;
    const int64_t columns = columns_of(panel, out_features);
    // What no column has is zeros: the rest of the last panel, and of the last block.
    if (columns < kPanel || segments % layout.segments_per_block) std::memset(own, 0, bytes);
    int64_t first = 0;
    for (int64_t segment = 0; segment < segments; segment += step) {
      if (segment == first + layout.segments_per_block) first = segment, own += layout.block_bytes;
      for (int64_t column = 0; column < columns; ++column) {
        work(ColumnWriter<Format>{own, layout, first, column}, panel * kPanel + column, segment);
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
    if (segment == writer.first) {
      const int64_t at = output * weight.groups + segment / layout.segments_per_block;
      writer.put_scale(weight.scales + at * size);
      if constexpr (Format::kZeros == Zeros::kPoints) writer.put_other(weight.zeros + at);
    }
    const uint8_t* numbers = weight.numbers + output * weight.in_features + segment * kInputs;
    const int64_t rest = weight.in_features - segment * kInputs;
    if (rest >= kInputs) return writer.put_numbers(segment, numbers);
    uint8_t padded[kInputs] = {};
    std::memcpy(padded, numbers, rest);
    writer.put_numbers(segment, padded);
  });
}

template <class... Formats>
void pack_as(SegmentFormats<Formats...>, int64_t format, const NumbersAndScales& weight, SegmentScales scales,
             int64_t segments_per_block, uint8_t* packed) {
  using Pack = void (*)(const NumbersAndScales&, const SegmentLayout&, uint8_t*);
  static constexpr Pack kPack[] = {&pack_numbers<Formats>...};
  kPack[format](weight, segment_kind(format).layout(scales, segments_per_block), packed);
}

// Blocks of some outputs of a file: the address of each output's.
struct FileRows {
  const uint8_t* const* rows;
  int64_t in_features, out_features;

  template <class Block>
  int64_t blocks() const { return in_features / kBlockInputs<Block>; }
};

template <class Block>
void pack_blocks(const FileRows& file, uint8_t* packed) {
  using Format = typename Block::Format;
  const SegmentLayout layout = SegmentLayout::of<Format>(Block::kScales, Block::kSegments);
  const int64_t segments = file.in_features / Format::kSegment;
  for_each_column<Format>(packed, layout, segments, file.out_features, Block::kSegments,
                          [&](const auto& writer, int64_t output, int64_t segment) {
    Block::read(file.rows[output] + segment / Block::kSegments * Block::kBytes, writer, segment);
  });
}

template <class Block>
void widen_blocks(const FileRows& file, float* out) {
  for_each_row(file.out_features, file.in_features, [&](int64_t output) {
    BlockWriter<Block> writer{out + output * file.in_features};
    for (int64_t i = 0; i < file.blocks<Block>(); ++i, writer.numbers += kBlockInputs<Block>) {
      Block::read(file.rows[output] + i * Block::kBytes, writer, 0);
    }
  });
}

// Sets `*is_damaged` where a scale is NaN or infinite.
template <class Block>
void check_blocks(const FileRows& file, int64_t* is_damaged) {
  std::atomic<bool> found{false};
  for_each_row(file.out_features, file.in_features, [&](int64_t output) {
    bool own = false;
    for (int64_t i = 0; i < file.blocks<Block>(); ++i) {
      for (const int at : {Block::kFirstScale, Block::kLastScale}) {
        uint16_t half;
        std::memcpy(&half, file.rows[output] + i * Block::kBytes + at, sizeof(half));
        own |= (half & 0x7c00) == 0x7c00;
      }
    }
    if (own) found.store(true, std::memory_order_relaxed);
  });
  *is_damaged = found.load();
}

struct BlockFunctions {
  void (*pack)(const FileRows& file, uint8_t* packed);
  void (*widen)(const FileRows& file, float* out);
  void (*check)(const FileRows& file, int64_t* is_damaged);
};

template <class... Types>
const BlockFunctions& functions_of(Blocks<Types...>, int64_t type) {
  static constexpr BlockFunctions kFunctions[] = {{&pack_blocks<Types>, &widen_blocks<Types>, &check_blocks<Types>}...};
  return kFunctions[type];
}

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
#define LLMSTACK_BLOCKS(name, Out)                                                                                  \
  extern "C" void llmstack_linear_##name##_blocks(const uint8_t* const* rows, int64_t type, int64_t in_features,    \
                                                  int64_t out_features, Out* out) {                                 \
    llmstack::functions_of(llmstack::AllBlocks(), type).name({rows, in_features, out_features}, out);               \
  }

LLMSTACK_BLOCKS(pack, uint8_t)
LLMSTACK_BLOCKS(widen, float)
LLMSTACK_BLOCKS(check, int64_t)
