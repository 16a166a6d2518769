// Weights of a query, which all attention takes from its products with a tile's keys.
//
// Scores are to base 2: e^x is 2^(x log2(e)), and that factor goes into the scale that products are multiplied with.
#pragma once

#include "operands.h"

namespace llmstack {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// Of kTileVectors where `kIsWhole`, else of `some_vectors`.
template <bool kIsWhole>
inline float largest_of(const Floats* products, int some_vectors) {
  const int vectors = kIsWhole ? kTileVectors : some_vectors;
  Floats best = products[0];
  for (int v = 1; v < vectors; ++v) best = maximum(best, products[v]);
  return largest(best);
}

// Stores 2^(product * scale - largest score). Returns `total` with these weights, lane by lane.
template <bool kIsWhole, class Element>
inline Floats store_weights(const Floats* products, int some_vectors, float product_scale, float largest_score,
                            Floats total, Element* weights) {
  const int vectors = kIsWhole ? kTileVectors : some_vectors;
  const Floats scale = broadcast(product_scale), negated = broadcast(-largest_score);
  for (int v = 0; v < vectors; ++v) {
    const Floats weight = power_of_2_below_1(multiply_add(products[v], scale, negated));
    store(weights + v * kLanes, weight);
    total += weight;
  }
  return total;
}

}  // namespace
}  // namespace llmstack
