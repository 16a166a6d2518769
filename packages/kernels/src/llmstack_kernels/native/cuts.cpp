// The cuts of this process.

#include "cuts.h"

#include <cstring>

namespace llmstack {

// Until they are set: of 48 KiB, 1 MiB and 16 MiB.
Cuts cuts{1 << 14, 1 << 13, 1 << 14, 1 << 18, 3 << 16, 1 << 19, 1 << 23, 1 << 17, 64, 1 << 18};

}  // namespace llmstack

extern "C" void llmstack_set_cuts(const int64_t* bytes) {
  std::memcpy(&llmstack::cuts, bytes, sizeof(llmstack::cuts));
}
