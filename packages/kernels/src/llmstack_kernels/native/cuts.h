// Sizes that are cut to fit the caches of the processor at hand. `caches.py` has the rule of each; they are set when the
// library is loaded. They say how far a sum gets before another one's turn, never the order of its terms: bits are the same for all.
#pragma once

#include <cstdint>

namespace llmstack {

// Bytes, in the order of `Cuts` in caches.py.
struct Cuts {
  int64_t stretch, few_rows_stretch, ahead, panel, panel_part, row_part, shared_rows, span, key_stretch, item;
};
extern Cuts cuts;

}  // namespace llmstack
