// Sums, gathers and messages between processes that have mapped the same memory.
//
// A rank publishes what it has written by a counter. Who needs it spins for a moment and then sleeps on the counter, so that
// an idle rank costs nothing. Two slots per rank alternate: a rank that writes a slot again has seen all others publish the
// exchange in between, which they do after they have read the slot.

#include <atomic>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../native/repeat.h"
#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSpinNs = 50'000;
constexpr int64_t kSleepNs = 50'000'000;  // how often a sleeping rank looks whether the others have given up

// In shared memory, a cache line each.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_sleepers;
};

// Numbered as `_STATUS_TO_REASON` in __init__.py.
enum Status : int64_t { kGood = 0, kTimedOut = 1, kAborted = 2 };

// One rank's place, in its own memory; `_Member` in __init__.py has the same fields.
struct Member {
  char* shared;
  int64_t rank;
  int64_t size;
  int64_t slot_bytes;
  int64_t sequence;
  int64_t status;
  int64_t timeout_ns;
};

inline Counter* counters(const Member& member) {
  return reinterpret_cast<Counter*>(member.shared);  // the first says that the group is broken, then one for each rank
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void sleep_while(Counter& counter, uint32_t seen) {
  const timespec limit = {0, kSleepNs};
#if defined(__linux__)
  syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  const timespec moment = {0, 50'000};
  nanosleep(seen == counter.value.load() ? &moment : &limit, nullptr);
#endif
}

inline void wake(Counter& counter) {
#if defined(__linux__)
  if (counter.num_sleepers.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
#endif
}

inline void publish(Counter& counter, uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

inline bool is_reached(const Counter& counter, uint32_t target) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

// Waits until the counter has reached the target; false where the group is broken, or nothing happens for too long.
bool wait_for(Member& member, Counter& counter, uint32_t target) {
  if (is_reached(counter, target)) return true;
  const int64_t start = now_ns();
  while (now_ns() - start < kSpinNs) {
    for (int i = 0; i < 32; ++i) {
      if (is_reached(counter, target)) return true;
      pause_briefly();
    }
  }
  Counter& broken = counters(member)[0];
  counter.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool has_come = false;
  while (!(has_come = is_reached(counter, target))) {
    if (broken.value.load() != 0) {
      member.status = kAborted;
      break;
    }
    if (now_ns() - start > member.timeout_ns) {
      member.status = kTimedOut;
      publish(broken, 1);
      break;
    }
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - target) < 0) sleep_while(counter, seen);
  }
  counter.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return has_come;
}

inline char* slot(const Member& member, int64_t rank) {
  const int64_t header = (1 + member.size) * kLine;
  return member.shared + header + ((member.sequence & 1) * member.size + rank) * member.slot_bytes;
}

// Begins the next exchange: `num_bytes` of this rank become visible, and all others' are there.
bool exchange(Member& member, const char* source, int64_t num_bytes) {
  if (member.status != kGood) return false;
  ++member.sequence;
  std::memcpy(slot(member, member.rank), source, num_bytes);
  const uint32_t number = static_cast<uint32_t>(member.sequence);
  publish(counters(member)[1 + member.rank], number);
  for (int64_t rank = 0; rank < member.size; ++rank) {
    if (rank != member.rank && !wait_for(member, counters(member)[1 + rank], number)) return false;
  }
  return true;
}

// The sum over the ranks in their order, in float32 and rounded once: the same bits everywhere.
template <class T>
void all_reduce(Member* group, T* data, int64_t num_elements) {
  Member& member = *group;
  const int64_t capacity = member.slot_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t start = 0; start < num_elements; start += capacity) {
    const int64_t count = num_elements - start < capacity ? num_elements - start : capacity;
    T* target = data + start;
    if (!exchange(member, reinterpret_cast<const char*>(target), count * sizeof(T))) return;
    const T* first = reinterpret_cast<const T*>(slot(member, 0));
    const int64_t stride = member.slot_bytes / static_cast<int64_t>(sizeof(T)), size = member.size;
    for_each_vector(count, [&](int64_t i, int n) {
      Floats sum = load_some(first + i, n);
      for (int64_t rank = 1; rank < size; ++rank) sum = sum + load_some(first + rank * stride + i, n);
      store_some(target + i, sum, n);
    });
  }
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_ALL_REDUCE(suffix, T)                                                                    \
  extern "C" void llmstack_all_reduce_##suffix(void* member, llmstack::T* data, int64_t num_elements) {   \
    llmstack::all_reduce(static_cast<llmstack::Member*>(member), data, num_elements);                     \
  }                                                                                                       \
  LLMSTACK_REPEATABLE(all_reduce_##suffix)

LLMSTACK_ALL_REDUCE(f32, Float32)
LLMSTACK_ALL_REDUCE(bf16, BFloat16)
LLMSTACK_ALL_REDUCE(f16, Float16)

// Rows of all ranks beside each other; rank r's bytes of a row are [offsets[r], offsets[r + 1]).
extern "C" void llmstack_all_gather(void* group, const char* own, char* out, int64_t num_rows, const int64_t* offsets) {
  llmstack::Member& member = *static_cast<llmstack::Member*>(group);
  const auto width = [offsets](int64_t rank) { return offsets[rank + 1] - offsets[rank]; };
  int64_t widest = 1;
  for (int64_t rank = 0; rank < member.size; ++rank) widest = width(rank) > widest ? width(rank) : widest;
  const int64_t capacity = member.slot_bytes / widest, row_bytes = offsets[member.size];
  for (int64_t start = 0; start < num_rows; start += capacity) {
    const int64_t count = num_rows - start < capacity ? num_rows - start : capacity;
    const int64_t own_width = width(member.rank);
    if (!llmstack::exchange(member, own + start * own_width, count * own_width)) return;
    for (int64_t rank = 0; rank < member.size; ++rank) {
      const char* source = llmstack::slot(member, rank);
      for (int64_t row = 0; row < count; ++row) {
        std::memcpy(out + (start + row) * row_bytes + offsets[rank], source + row * width(rank), width(rank));
      }
    }
  }
}
LLMSTACK_REPEATABLE(all_gather)

// A link has one sender and one receiver: rank 0 counts the pieces written, rank 1 those read. The slots are a ring.
extern "C" void llmstack_link_send(void* group, const char* data, int64_t num_bytes, int64_t num_slots) {
  llmstack::Member& member = *static_cast<llmstack::Member*>(group);
  char* ring = member.shared + 3 * llmstack::kLine;
  for (int64_t start = 0; start < num_bytes; start += member.slot_bytes) {
    if (member.status != llmstack::kGood) return;
    const int64_t count = num_bytes - start < member.slot_bytes ? num_bytes - start : member.slot_bytes;
    const int64_t number = ++member.sequence;
    const uint32_t needed = static_cast<uint32_t>(number - num_slots);
    if (number > num_slots && !llmstack::wait_for(member, llmstack::counters(member)[2], needed)) return;
    std::memcpy(ring + (number % num_slots) * member.slot_bytes, data + start, count);
    llmstack::publish(llmstack::counters(member)[1], static_cast<uint32_t>(number));
  }
}
LLMSTACK_REPEATABLE(link_send)

extern "C" void llmstack_link_receive(void* group, char* data, int64_t num_bytes, int64_t num_slots) {
  llmstack::Member& member = *static_cast<llmstack::Member*>(group);
  const char* ring = member.shared + 3 * llmstack::kLine;
  for (int64_t start = 0; start < num_bytes; start += member.slot_bytes) {
    if (member.status != llmstack::kGood) return;
    const int64_t count = num_bytes - start < member.slot_bytes ? num_bytes - start : member.slot_bytes;
    const int64_t number = ++member.sequence;
    const uint32_t needed = static_cast<uint32_t>(number);
    if (!llmstack::wait_for(member, llmstack::counters(member)[1], needed)) return;
    std::memcpy(data + start, ring + (number % num_slots) * member.slot_bytes, count);
    llmstack::publish(llmstack::counters(member)[2], needed);
  }
}
LLMSTACK_REPEATABLE(link_receive)

// Tells all ranks that wait, or will, that nothing comes any more.
extern "C" void llmstack_abort_group(void* group) {
  llmstack::Member& member = *static_cast<llmstack::Member*>(group);
  for (int64_t i = 0; i <= member.size; ++i) {
    if (i == 0) llmstack::counters(member)[0].value.store(1);
#if defined(__linux__)
    syscall(SYS_futex, &llmstack::counters(member)[i].value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }
}
