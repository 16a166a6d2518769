// The outputs of several layers, one after another in each row.

#include "../native/repeat.h"
#include "../native/rows.h"

// Copies rows, which follow one another, to rows that are `out_stride` bytes apart.
extern "C" void llmstack_copy_rows(const uint8_t* rows, int64_t num_rows, int64_t row_bytes, uint8_t* out,
                                   int64_t out_stride) {
  llmstack::for_each_row(num_rows, row_bytes, [&](int64_t row) {
    std::memcpy(out + row * out_stride, rows + row * row_bytes, row_bytes);
  });
}
LLMSTACK_REPEATABLE(copy_rows)
