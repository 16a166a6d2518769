#include "threads.h"

namespace {
llmstack::ParallelRegion region = nullptr;
int (*max_threads)() = nullptr;
}  // namespace

namespace llmstack {

ParallelRegion parallel_region() {
  return region;
}

int num_threads() {
  return max_threads == nullptr ? 1 : max_threads();
}

}  // namespace llmstack

// Both are functions of the OpenMP runtime: `GOMP_parallel` and `omp_get_max_threads`, which `torch.set_num_threads` sets.
extern "C" void llmstack_set_threads(llmstack::ParallelRegion parallel_region, int (*omp_get_max_threads)()) {
  region = parallel_region;
  max_threads = omp_get_max_threads;
}
