// Work shared among the threads of a pool: a caller never waits for a thread that has not begun.
#pragma once

#include <atomic>
#include <cstdint>

namespace llmstack {

// How many threads may work at once; `torch.set_num_threads` sets it.
int num_threads();

// Calls `body(data)` on the calling thread, and on the pool's threads that join before the calling one is done, at most
// `max_threads` in all. Returns when all that joined have left.
void share(void (*body)(void*), void* data, int max_threads);

// Calls `work(chunk)` once for each chunk in [0, num_chunks). Threads take the next chunk when they are done with one, so
// that a thread which lost its core for a while holds the others up by one chunk at most.
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
  if (threads > 1) {
    share(body, &shared, static_cast<int>(threads));
  } else {
    body(&shared);
  }
}

}  // namespace llmstack
