// The formats of segments by their codes, which `native_segments.py` names in the same order.
#pragma once

#include "native_segments.h"

namespace llmstack {

// What a function that is not compiled for each format needs to know of one.
struct SegmentKind {
  int inputs, middle;
  Zeros zeros;
  SegmentLayout (*layout)(SegmentScales scales, int64_t segments_per_block);
  // Sums of rows over a panel: [num_rows, kVectors].
  void (*add_rows)(const uint8_t* panel, const SegmentLayout& layout, const RoundedRows& rows, int64_t num_rows,
                   int64_t panel_bytes, Floats* sums);
};

// The kind with the code `format`.
const SegmentKind& segment_kind(int64_t format);

template <class... Formats>
struct SegmentFormats {};
using AllSegmentFormats =
    SegmentFormats<SegmentFormat<4, Zeros::kMiddle>, SegmentFormat<4, Zeros::kPoints>, SegmentFormat<4, Zeros::kSmallest>,
                   SegmentFormat<5, Zeros::kMiddle>, SegmentFormat<5, Zeros::kSmallest>, SegmentFormat<6, Zeros::kMiddle, 16>,
                   SegmentFormat<8, Zeros::kMiddle>, SegmentFormat<8, Zeros::kPoints>>;

}  // namespace llmstack
