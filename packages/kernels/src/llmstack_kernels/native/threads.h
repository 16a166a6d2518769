// Work shared among the threads of the pool that PyTorch's own operations use.
#pragma once

#include <atomic>
#include <cstdint>

namespace llmstack {

// `GOMP_parallel` of the OpenMP runtime that PyTorch has loaded: runs `body(data)` on `num_threads` threads.
using ParallelRegion = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

ParallelRegion parallel_region();
int num_threads();

// Calls `work(chunk)` once for each chunk in [0, num_chunks). Threads take the next chunk when they are done with one, so
// that a thread which lost its core for a while holds the others up by one chunk only.
template <class Work>
void for_each_chunk(int64_t num_chunks, const Work& work) {
  struct Shared {
    const Work& work;
    const int64_t num_chunks;
    std::atomic<int64_t> next;
  } shared{work, num_chunks, {0}};
  const auto body = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    for (int64_t chunk; (chunk = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.num_chunks;) {
      shared.work(chunk);
    }
  };
  const int64_t threads = num_chunks < num_threads() ? num_chunks : num_threads();
  if (threads > 1 && parallel_region() != nullptr) {
    parallel_region()(body, &shared, static_cast<unsigned>(threads), 0);
  } else {
    body(&shared);
  }
}

}  // namespace llmstack
