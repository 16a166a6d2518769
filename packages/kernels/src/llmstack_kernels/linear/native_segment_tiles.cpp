// Sums of rounded rows over a panel, in tiles, for each format of segments.

#include "native.h"
#include "native_segment_formats.h"

namespace llmstack {
namespace {

// With AVX-512 a tile has all columns of a panel; wider or taller tiles have no registers for their sums (measured). A single
// row takes all columns with AVX2, too, so that it reads the panel in order.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kSegmentRows = 6, kSegmentVectors = 2;
using SegmentWidths = PassWidths<kWideVectors, kSegmentVectors, kSegmentVectors, 4, 4>;
#else
constexpr int kSegmentRows = 4, kSegmentVectors = 4;
using SegmentWidths = PassWidths<kWideVectors, kSegmentVectors>;
#endif

template <class Format>
void add_rows(const uint8_t* panel, const SegmentLayout& layout, const RoundedRows& rows, int64_t num_rows,
              int64_t panel_bytes, Floats* sums) {
  const Place<Format::kNumberBytes + 2 * kPanel> place{panel, panel_bytes, panel_bytes * num_threads()};
  const auto tile = [&](auto count, auto vectors, int64_t row, int vector, auto ahead) {
    segment_tile<Format, count, vectors>(panel, layout, rows.from(row, Format::kSegment), vector, sums + row * kVectors, ahead);
  };
  if (num_rows == 1 && streams_weights.load(std::memory_order_relaxed)) {
    const auto ahead = place.template own<kVectors / kWideVectors, kStreamLevel>(rows.segments);
    for (int vector = 0; vector < kVectors; vector += kWideVectors) {
      tile(std::integral_constant<int, 1>(), std::integral_constant<int, kWideVectors>(), 0, vector, ahead);
    }
    return;
  }
  for_each_pass<kSegmentRows, SegmentWidths, kVectors, true>(place, rows.segments, 0, num_rows, tile);
}

template <class... Formats>
const SegmentKind& find_kind(SegmentFormats<Formats...>, int64_t format) {
  static constexpr SegmentKind kKinds[] = {{Formats::kSegment, Formats::kMiddle, Formats::kZeros,
                                            &SegmentLayout::of<Formats>, &add_rows<Formats>}...};
  return kKinds[format];
}

}  // namespace

const SegmentKind& segment_kind(int64_t format) {
  return find_kind(AllSegmentFormats(), format);
}

}  // namespace llmstack
