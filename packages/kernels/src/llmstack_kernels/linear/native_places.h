// Where a panel lies in memory: what is prefetched of it and of the next one, and the parts that it is passed over in.
#pragma once

#include <atomic>
#include <cstdint>

#include "../native/cuts.h"
#include "../native/simd.h"
#include "../native/threads.h"

namespace llmstack {

// What is prefetched while a tile is computed. Where a panel is passed over once, that is its own memory. Else each pass
// prefetches a share of the thread's next panel: so memory is read during all passes, not in the first one alone.
template <int kLines, int kLevel>
struct Ahead {
  const uint8_t* at;
  int64_t stride;  // from step to step

  void prefetch() {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at + 64 * line, 0, 4 - kLevel);
    at += stride;
  }
};
constexpr int64_t kAheadBytes = 4096;
// Of a single row's small numbers: to widen them takes one thread longer than to read them. Several wait for the memory.
inline int64_t small_ahead_bytes() {
  return num_threads() == 1 ? 8192 : kAheadBytes;
}

// Where a single row's step takes few instructions, more lines are under way to the second level (1.1 times the speed).
#if defined(__AVX512BF16__)
constexpr int kSingleLevel = 2;
#else
constexpr int kSingleLevel = 1;
#endif

// Set where a model's weights exceed the processor's caches. A single row's then bypass them (level 4: `prefetchnta`), so
// that what the program needs between two steps stays there.
extern std::atomic<bool> streams_weights;
constexpr int kStreamLevel = 4;

// With more passes, reading takes so little of the time that a second panel in the cache costs more.
constexpr int64_t kManyPasses = 8;
constexpr int64_t kManyRows = 48;  // the same in rows, of the usual tiles

// Few rows take a panel in stretches, one tile after the other: the first-level cache holds the weights of a stretch.
#if defined(__AVX512F__)
constexpr int64_t kStretchRows = 15;  // more rows compute so long that whole passes hide the reads, too
#else
constexpr int64_t kStretchRows = 0;  // with smaller registers a few rows do
#endif
// With AVX2, rows so few that they wait for memory take stretches: a panel is then read in order, as for a single row.
template <class T>
constexpr int64_t kMostFewRows = !kHasFewRegisters ? 0 : sizeof(T) == 4 ? 6 : 3;

// The memory of a panel, and the distance to the one that this thread is likely to compute next.
template <int kStepBytes>
struct Place {
  // Of its own memory: with AVX2 some steps, which has 1.1 times the speed of kAheadBytes on Zen 3.
  static constexpr int64_t kOwnAhead = kHasFewRegisters ? 4 * (kStepBytes > 256 ? kStepBytes : 256) : kAheadBytes;

  const uint8_t* start;
  int64_t bytes, distance;

  static Place of(const void* packed, int64_t index, int64_t steps) {
    const int64_t bytes = steps * kStepBytes;
    return {static_cast<const uint8_t*>(packed) + index * bytes, bytes, bytes * num_threads()};
  }
  // A part of the next panel, for passes over weights that were read before.
  template <int kCount>
  Place<kStepBytes / kCount> part_of_next(int64_t index) const {
    return {start + distance + bytes / kCount * index, bytes / kCount, 0};
  }
  // For pass `pass` of `passes`, of which there are kShare at least, what it needs itself or of the next panel.
  template <int kShare, int kLevel>
  Ahead<(kStepBytes / kShare + 63) / 64, kLevel> own(int64_t steps, int64_t ahead = kOwnAhead) const {
    return {start + ahead, bytes / steps};
  }
  template <int kShare>
  Ahead<(kStepBytes / kShare + 63) / 64, 2> next(int64_t pass, int64_t passes, int64_t steps) const {
    return {start + distance + bytes / passes * pass, (bytes / passes + steps - 1) / steps};
  }
  // For one of the passes that share a stretch. At the end of the panel, from the thread's next one.
  Ahead<(kStepBytes / 2 + 63) / 64, 1> part_of_stretch(int64_t pass, int64_t passes, int64_t step, int64_t steps) const {
    const int64_t offset = step * kStepBytes + cuts.ahead;
    const uint8_t* from = start + offset + (offset < bytes ? 0 : distance - bytes);
    return {from + steps * kStepBytes / passes * pass, kStepBytes / passes};
  }
  static int64_t steps_of(int64_t stretch) { return stretch > kStepBytes ? stretch / kStepBytes : 1; }

  // Nearly equal parts of the panel's inputs, over each of which all rows pass before the next. Passes of few rows fetch what
  // comes next meanwhile; those of many rows have the second-level cache for one panel.
  int64_t num_parts(int64_t rows) const {
    const int64_t whole = rows > kManyRows ? 2 * cuts.panel : cuts.panel;
    return bytes <= whole ? 1 : (bytes + cuts.panel_part - 1) / cuts.panel_part;
  }
  // The steps [begin, end), and the distance to those that come next.
  Place part(int64_t begin, int64_t end) const {
    const int64_t offset = begin * kStepBytes, own = (end - begin) * kStepBytes;
    return {start + offset, own, offset + own < bytes ? own : distance - offset};
  }
};

}  // namespace llmstack
