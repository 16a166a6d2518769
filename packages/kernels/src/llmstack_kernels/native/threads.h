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

constexpr int64_t kRunBytes = 1 << 18;  // beyond that, starting somewhere else costs little
constexpr int64_t kLeastRuns = 4;  // per thread, so that they end at about the same time

// Calls `work(index)` for each part of a memory that is read once, each of `bytes`. A thread takes several at once, one
// behind the other: what is prefetched at the end of a part is then its own next one.
template <class Work>
void for_each_in_runs(int64_t count, int64_t bytes, const Work& work) {
  const int64_t fitting = kRunBytes / bytes, most = count / (kLeastRuns * num_threads());
  const int64_t allowed = fitting < most ? fitting : most, run = allowed > 1 ? allowed : 1;
  for_each_chunk((count + run - 1) / run, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * run < count ? (chunk + 1) * run : count;
    for (int64_t index = chunk * run; index < end; ++index) work(index);
  });
}

}  // namespace llmstack
