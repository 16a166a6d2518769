// A token per row, drawn at random: temperature, min-p, top-k, top-p, and inversion of the distribution function.
//
// Rows are not sorted. Tokens fall into buckets by how far their logits are below the largest, and only the buckets in which
// a set ends or the draw falls are sorted.

#include <algorithm>
#include <vector>

#include "../native/rows.h"

namespace llmstack {
namespace {

constexpr float kBucketsPerNat = 32;
constexpr float kLowest = 87;  // weights below e to the power of -87 are 0
constexpr int64_t kNumBuckets = (static_cast<int64_t>(kLowest) + 1) * static_cast<int64_t>(kBucketsPerNat);
constexpr int64_t kMaxRanked = 256;
constexpr int64_t kBlock = 128;

// How a row's token is drawn.
struct Choice {
  float best, temperature, min_p;
  int64_t top_k;
  double top_p, uniform;
};

// The most likely tokens: all of the buckets before `bucket`, and the first `num_in_bucket` of that.
struct Set {
  int64_t bucket, num_in_bucket, count;
  double mass;
};

// One row at a time, in memory that the thread keeps.
class Draw {
 public:
  int64_t token(const float* logits, int64_t size, const Choice& choice) {
    logits_ = logits;
    size_ = size;
    weigh(choice);
    const bool has_top_k = choice.top_k < size, has_top_p = choice.top_p < 1;
    if (!has_top_k && !has_top_p) return invert_by_id(choice.uniform);
    tally();
    Set set = has_top_k ? first(choice.top_k) : all();
    if (has_top_p) set = reaching(choice.top_p * set.mass, set);
    const int64_t most = std::min(kMaxRanked, size);
    const bool is_ranked = has_top_k ? choice.top_k <= kMaxRanked : set.count < most;
    if (is_ranked) return invert_by_rank(choice.uniform * set.mass, set);
    drop_others(set);
    return invert_by_id(choice.uniform);
  }

 private:
  // Probabilities relative to the most likely token's, 0 below min-p, and the buckets.
  void weigh(const Choice& choice) {
    weights_.resize(size_);
    buckets_.resize(size_);
    const Floats best = broadcast(choice.best), temperature = broadcast(choice.temperature);
    const Floats lowest = broadcast(kLowest), last = broadcast(kLowest + 0.5f), least = broadcast(choice.min_p);
    for_each_vector(size_, [&](int64_t i, int n) {
      const Floats below = (best - load_some(logits_ + i, n)) / temperature;
      const Floats weight = below <= lowest ? exponential(-below) : broadcast(0.0f);
      store_some(weights_.data() + i, weight >= least ? weight : broadcast(0.0f), n);
      const Floats bounded = below < last ? below : last;  // no number is bounded, too
      const Ints bucket = __builtin_convertvector(bounded * broadcast(kBucketsPerNat), Ints);
      std::memcpy(buckets_.data() + i, &bucket, n * sizeof(int32_t));
    });
  }

  void tally() {
    masses_.assign(kNumBuckets, 0.0);
    counts_.assign(kNumBuckets, 0);
    for (int64_t i = 0; i < size_; ++i) {
      masses_[buckets_[i]] += weights_[i];
      ++counts_[buckets_[i]];
    }
  }

  Set all() const {
    double mass = 0;
    for (const double part : masses_) mass += part;
    return {kNumBuckets - 1, counts_[kNumBuckets - 1], size_, mass};
  }

  Set first(int64_t count) {
    Set set = {0, 0, 0, 0.0};
    while (set.count + counts_[set.bucket] < count) {
      set.count += counts_[set.bucket];
      set.mass += masses_[set.bucket++];
    }
    const std::vector<int32_t>& tokens = ranked(set.bucket);
    for (; set.count < count; ++set.count) set.mass += weights_[tokens[set.num_in_bucket++]];
    return set;
  }

  // The fewest tokens of `within` that have this mass, at least one.
  Set reaching(double mass, const Set& within) {
    Set set = {0, 0, 0, 0.0};
    while (set.bucket < within.bucket && set.mass + masses_[set.bucket] < mass) {
      set.count += counts_[set.bucket];
      set.mass += masses_[set.bucket++];
    }
    const std::vector<int32_t>& tokens = ranked(set.bucket);
    const int64_t most = set.bucket < within.bucket ? counts_[set.bucket] : within.num_in_bucket;
    while (set.num_in_bucket < most && (set.count == 0 || set.mass < mass)) {
      set.mass += weights_[tokens[set.num_in_bucket++]];
      ++set.count;
    }
    return set;
  }

  // The tokens of a bucket, most likely first, then by id.
  const std::vector<int32_t>& ranked(int64_t bucket) {
    ranked_.clear();
    const Ints wanted = static_cast<int32_t>(bucket) - Ints{};
    for_each_vector(size_, [&](int64_t i, int n) {
      Ints found;
      if (n == kLanes) {
        std::memcpy(&found, buckets_.data() + i, sizeof(found));
        if (!has_any(found == wanted)) return;
      }
      for (int lane = 0; lane < n; ++lane) {
        if (buckets_[i + lane] == bucket) ranked_.push_back(static_cast<int32_t>(i + lane));
      }
    });
    std::sort(ranked_.begin(), ranked_.end(), [&](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    });
    return ranked_;
  }

  int64_t invert_by_rank(double target, const Set& set) {
    double before = 0;
    int64_t bucket = 0;
    while (bucket < set.bucket && before + masses_[bucket] <= target) before += masses_[bucket++];
    const std::vector<int32_t>& tokens = ranked(bucket);
    const int64_t count = bucket < set.bucket ? counts_[bucket] : set.num_in_bucket;
    int64_t chosen = -1;
    for (int64_t place = 0; place < count; ++place) {
      const float weight = weights_[tokens[place]];
      if (weight > 0) chosen = tokens[place];  // the last one if rounding lets none exceed the target
      before += weight;
      if (before > target) break;
    }
    return chosen >= 0 ? chosen : most_likely();
  }

  void drop_others(const Set& set) {
    for (int64_t i = 0; i < size_; ++i) weights_[i] = buckets_[i] <= set.bucket ? weights_[i] : 0.0f;
    const std::vector<int32_t>& tokens = ranked(set.bucket);
    for (size_t place = set.num_in_bucket; place < tokens.size(); ++place) weights_[tokens[place]] = 0;
  }

  // Blocks are summed first, then one block is searched.
  int64_t invert_by_id(double uniform) {
    sums_.clear();
    double mass = 0;
    for (int64_t start = 0; start < size_; start += kBlock) {
      Floats sums = {};
      for_each_vector(std::min(kBlock, size_ - start),
                      [&](int64_t i, int n) { sums = sums + load_some(weights_.data() + start + i, n); });
      sums_.push_back(sum(sums));
      mass += sums_.back();
    }
    const double target = uniform * mass;
    double before = 0;
    int64_t block = -1, last = 0;
    for (size_t i = 0; i < sums_.size() && block < 0; ++i) {
      if (sums_[i] > 0) last = static_cast<int64_t>(i);
      if (before + sums_[i] > target) block = static_cast<int64_t>(i);
      else before += sums_[i];
    }
    if (block < 0) block = last;
    int64_t chosen = -1;
    for (int64_t i = block * kBlock; i < std::min(size_, (block + 1) * kBlock); ++i) {
      if (weights_[i] > 0) chosen = i;
      before += weights_[i];
      if (before > target) break;
    }
    return chosen >= 0 ? chosen : most_likely();
  }

  // Where nothing can be drawn, any valid token will do: the caller knows from the largest logit.
  int64_t most_likely() const { return std::max_element(weights_.begin(), weights_.end()) - weights_.begin(); }

  static bool has_any(Ints hits) {
    bool found = false;
    for (int lane = 0; lane < kLanes; ++lane) found |= hits[lane] != 0;
    return found;
  }

  const float* logits_ = nullptr;
  int64_t size_ = 0;
  std::vector<float> weights_;
  std::vector<int32_t> buckets_, ranked_;
  std::vector<double> masses_, sums_;
  std::vector<int64_t> counts_;
};

}  // namespace
}  // namespace llmstack

extern "C" void llmstack_draw_tokens_f32(const float* logits, const int64_t* rows, const float* best,
                                         const float* temperature, const float* min_p, const int64_t* top_k,
                                         const double* top_p, const double* uniforms, int64_t* token_ids,
                                         int64_t num_rows, int64_t size) {
  llmstack::for_each_row(num_rows, size, [=](int64_t i) {
    thread_local llmstack::Draw draw;
    const int64_t row = rows[i];
    token_ids[i] = draw.token(logits + row * size, size,
                              {best[row], temperature[i], min_p[i], top_k[i], top_p[i], uniforms[i]});
  });
}
