// A pool of threads beside OpenMP's.
//
// A step is some hundred operations of 10 to 200 µs, and OpenMP joins all its threads at the end of each. Where another
// process has a core, that costs a time slice of the scheduler per operation: a decode step of GPT-2 took 250 ms beside one
// busy process, against 14 alone. Here the calling thread does what no other thread has taken, and waits only for threads
// at work. Threads look for more work for some 50 µs, the gap between two operations, and then sleep.

#include "threads.h"

#include <sched.h>

#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmstack {
namespace {

constexpr int kSpins = 2000;       // looks for work before a thread sleeps
constexpr int kMaxThreads = 1024;

int (*max_threads_of_torch)() = nullptr;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The current job. `state` is a ticket number times kTicket, plus kOpen while threads may come, plus the number of those that
// are at work: so one operation both checks that the job is still there and holds it.
constexpr uint64_t kOpen = 1 << 15, kTicket = 1 << 16;
struct Job {
  std::atomic<uint64_t> state{0};
  std::atomic<uint32_t> call{0};  // counts jobs; sleepers wait for it to change
  void (*body)(void*) = nullptr;
  void* data = nullptr;
  std::atomic<int> max_threads{0};
} job;
std::mutex caller;  // one job at a time
int num_workers = 0;

// True if the calling thread has joined the job; it must leave with `leave`.
bool enter() {
  uint64_t state = job.state.load(std::memory_order_acquire);
  while (state & kOpen) {
    const int num_inside = static_cast<int>(state & (kOpen - 1));
    if (num_inside + 1 >= job.max_threads.load(std::memory_order_relaxed)) return false;  // the caller is one of them
    if (job.state.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void leave() {
  job.state.fetch_sub(1, std::memory_order_release);
}

void wait_for_call(uint32_t last) {
  for (int i = 0; i < kSpins; ++i) {
    if (job.call.load(std::memory_order_acquire) != last) return;
    pause();
  }
  job.call.wait(last, std::memory_order_acquire);
}

void work_forever() {
  for (uint32_t last = 0;;) {
    const uint32_t call = job.call.load(std::memory_order_acquire);
    if (call == last) {
      wait_for_call(last);
      continue;
    }
    last = call;
    if (!enter()) continue;
    job.body(job.data);
    leave();
  }
}

void hire(int wanted) {
  try {
    for (; num_workers < wanted; ++num_workers) std::thread(work_forever).detach();
  } catch (const std::system_error&) {
    // The system refuses more threads: the existing ones do the work.
  }
}

}  // namespace

int num_threads() {
  const int found = max_threads_of_torch == nullptr ? 1 : max_threads_of_torch();
  return found < kMaxThreads ? found : kMaxThreads;
}

void share(void (*body)(void*), void* data, int max_threads) {
  std::unique_lock<std::mutex> alone(caller, std::try_to_lock);
  if (!alone.owns_lock()) return body(data);  // another thread of the program has the pool
  hire(max_threads - 1);
  job.body = body;
  job.data = data;
  job.max_threads.store(max_threads, std::memory_order_relaxed);
  const uint64_t ticket = (job.state.load(std::memory_order_relaxed) / kTicket + 1) * kTicket;
  job.state.store(ticket | kOpen, std::memory_order_release);
  job.call.fetch_add(1, std::memory_order_release);
  job.call.notify_all();
  body(data);
  uint64_t state = job.state.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (int i = 0; state != ticket; ++i, state = job.state.load(std::memory_order_acquire)) {
    if (i < kSpins) {
      pause();
    } else {
      sched_yield();  // a thread at work may need this very core
    }
  }
}

}  // namespace llmstack

// Set once when the library is loaded: `omp_get_max_threads` of the runtime that PyTorch uses.
extern "C" void llmstack_set_threads(int (*max_threads)()) {
  llmstack::max_threads_of_torch = max_threads;
}
