// Linear layers over small numbers with a scale per group of inputs and column: weight = (number - zero point) * scale, or
// table[number] * scale.
//
// Numbers are widened exactly: scales keep their type, and zero points are subtracted from the numbers. Up to `kDirectRows`
// rows that happens in registers, again for each tile. For more rows a span of a panel's inputs is widened into memory that
// the caches hold, all rows pass over it, and their sums wait for the next span; they are the same bit for bit.

#include <vector>

#include "../native/repeat.h"
#include "native_numbers.h"

namespace llmstack {
namespace {

// bfloat16 that is computed on as float32, for weights that bfloat16 cannot hold.
struct WideBFloat16 : BFloat16 {};
inline Floats load(const WideBFloat16* p) {
  return llmstack::load(static_cast<const BFloat16*>(p));
}
inline void store(WideBFloat16* p, Floats x) {
  llmstack::store(static_cast<BFloat16*>(p), x);
}

// What scales are stored in.
enum class ScaleType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t scale_bytes(ScaleType type) {
  return type == ScaleType::kFloat32 ? 4 : 2;
}

// Groups of a panel, and their scales [num_groups, 64] with the factor of their numbers taken out.
struct Groups {
  const uint8_t* scales;
  ScaleType type;
  int64_t num_groups, group_size;
  float inverse_factor;
  // About so many inputs: whole groups, or whole words of numbers where there is one group.
  int64_t span_inputs(int64_t wanted) const {
    const int64_t unit = num_groups == 1 ? 8 : group_size;
    return wanted > unit ? wanted / unit * unit : unit;
  }
  Floats scale(int64_t group, int vector) const {
    const int64_t at = group * kPanel + vector * kLanes;
    switch (type) {
      case ScaleType::kBFloat16:
        return inverse_factor * llmstack::load(reinterpret_cast<const BFloat16*>(scales) + at);
      case ScaleType::kFloat16:
        return inverse_factor * llmstack::load(reinterpret_cast<const Float16*>(scales) + at);
      default:
        return inverse_factor * llmstack::load(reinterpret_cast<const float*>(scales) + at);
    }
  }
};

// Inputs [begin, end) of all.
struct Span {
  int64_t begin, end, num_inputs;
};

// Rows of inputs as products take them.
template <class W>
struct InputRows {
  const W* x;
  int64_t stride;
};

// A function of its own with AVX2 or AVX-512, into which all is inlined. Where GCC 12 inlines it, it stores sums in each step.
#if defined(__AVX2__)
#define LLMSTACK_ALONE __attribute__((noinline, flatten))
constexpr bool kIsAlone = true;
#else
#define LLMSTACK_ALONE
constexpr bool kIsAlone = false;
#endif

// Adds to a tile's sums. With AVX2 six rows of 8 bits fill the registers, and GCC then does better with loops (measured).
template <int kRows, int kColumnVectors, class X, class Panel, class Ahead>
void add_to(Tile<kRows, kColumnVectors>& tile, const X* x, int64_t stride, const Panel& panel, int first_vector,
            int64_t begin, int64_t end, Ahead& ahead) {
  if constexpr (kIsAlone && kRows > 1 && (!kHasFewRegisters || kRows < kTileRows || Panel::kInputs == 8)) {
    tile.add_in_registers(x, stride, panel, first_vector, begin, end, ahead);
  } else {
    tile.add(x, stride, panel, first_vector, begin, end, ahead);
  }
}

// Some rows' sums over a span, added to `sums` [rows, kVectors].
template <int kRows, int kColumnVectors, class W, class Panel, class Ahead>
LLMSTACK_ALONE void add_span(const InputRows<W>& rows, const Panel& panel, const Groups& groups, const Span& span,
                             Floats* sums, int first_vector, Ahead ahead) {
  constexpr int kInputs = Panel::kInputs;
  Tile<kRows, kColumnVectors> tile;
  const auto for_each_sum = [&](const auto& work) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kColumnVectors; ++v) work(tile.sums[r][v], r, v);
    }
  };
  if (span.begin) for_each_sum([&](Floats& sum, int r, int v) { sum = sums[r * kVectors + first_vector + v]; });
  if (groups.num_groups == 1) {
    const auto own = panel.template in_group<kColumnVectors, kRows>(0, first_vector);
    add_to(tile, rows.x, rows.stride, own, first_vector, span.begin / kInputs, span.end / kInputs, ahead);
    if (span.end == span.num_inputs) {
      for_each_sum([&](Floats& sum, int, int v) { sum = multiply_add(sum, groups.scale(0, first_vector + v), Floats{}); });
    }
  } else {
    for (int64_t group = span.begin / groups.group_size; group * groups.group_size < span.end; ++group) {
      const int64_t begin = group * groups.group_size, end = begin + groups.group_size;
      const auto own = panel.template in_group<kColumnVectors, kRows>(group, first_vector);
      Tile<kRows, kColumnVectors> partial;
      const int64_t stop = end < span.end ? end : span.end;
      add_to(partial, rows.x, rows.stride, own, first_vector, begin / kInputs, stop / kInputs, ahead);
      for (int v = 0; v < kColumnVectors; ++v) {
        const Floats scale = groups.scale(group, first_vector + v);
        for (int r = 0; r < kRows; ++r) tile.sums[r][v] = multiply_add(partial.sums[r][v], scale, tile.sums[r][v]);
      }
    }
  }
  for_each_sum([&](Floats& sum, int r, int v) { sums[r * kVectors + first_vector + v] = sum; });
}

// A panel's words [steps, 64], and what its groups have beside them: zero points [num_groups, 64], or the table.
template <class W, class Format>
struct StoredPanel {
  using Weight = W;
  static constexpr int kInputs = 32 / Format::kBits, kStepBytes = kPanel * sizeof(uint32_t);
  const uint32_t* packed;
  const void* extra;

  template <int kColumnVectors, int kRows>
  struct Group {
    using Weight = StoredPanel::Weight;
    static constexpr int kInputs = StoredPanel::kInputs;
    const uint32_t* packed;
    int first_vector;
    Weights<Format, W, kColumnVectors, kRows> weights;

    struct WordColumn {
      const Group& group;
      Words words;
      int v;
      auto part(int index) const { return group.weights.part(words, index, v); }
    };
    WordColumn column(int64_t step, int vector) const {
      Words words;
      std::memcpy(&words, packed + step * kPanel + vector * kLanes, sizeof(words));
      return {*this, words, vector - first_vector};
    }
  };
  template <int kColumnVectors, int kRows>
  Group<kColumnVectors, kRows> in_group(int64_t group, int first_vector) const {
    return {packed, first_vector, {extra, group, first_vector}};
  }
};

// Inputs of a panel from `begin` on, widened: [inputs / kStep, kVectors].
template <class W>
struct WidenedSpan {
  using Weight = W;
  static constexpr int kInputs = kStep<W>;
  const Column<W>* columns;
  int64_t begin;

  template <int, int>
  const WidenedSpan& in_group(int64_t, int) const {
    return *this;
  }
  Column<W> column(int64_t step, int vector) const {
    return columns[(step - begin / kInputs) * kVectors + vector];
  }
};

template <class W, class Format>
void widen_span(const StoredPanel<W, Format>& panel, const Groups& groups, const Span& span, Column<W>* columns) {
  constexpr int kInputs = StoredPanel<W, Format>::kInputs, kParts = kInputs / kStep<W>;
  for (int64_t begin = span.begin, end; begin < span.end; begin = end) {
    const int64_t group = begin / groups.group_size, group_end = (group + 1) * groups.group_size;
    end = group_end < span.end ? group_end : span.end;
    const auto own = panel.template in_group<kVectors, kTileRows>(group, 0);
    for (int64_t step = begin / kInputs; step < end / kInputs; ++step, columns += kParts * kVectors) {
      for (int line = 0; line < 4; ++line) {
        __builtin_prefetch(reinterpret_cast<const char*>(panel.packed + step * kPanel) + kAheadBytes + 64 * line);
      }
      for (int v = 0; v < kVectors; ++v) {
        const auto column = own.column(step, v);
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) columns[part * kVectors + v] = {column.part(part)};
      }
    }
  }
}

// Nothing is prefetched.
struct NoAhead {
  void prefetch() {}
};
struct NoPlace {
  template <int, int>
  NoAhead own(int64_t, int64_t = 0) const {
    return {};
  }
  template <int>
  NoAhead next(int64_t, int64_t, int64_t) const {
    return {};
  }
};

// Two and three rows need so many vectors with AVX2, since fewer than eight sums wait for their products.
template <class Format, class W>
struct StoredTiles {
  static constexpr int kMaxRows = kTileRows;
  using Widths = PassWidths<kWideVectors, kTileVectors, kTileVectors, kHasFewRegisters ? 4 : kTileVectors,
                            kHasFewRegisters && !std::is_same_v<Format, Named> ? 3 : kTileVectors>;
};

// Where numbers take longer to widen than a few rows to multiply, taller tiles widen them half as often.
struct TallTiles {
  static constexpr int kMaxRows = 12;
  struct Widths {
    static constexpr int of(int64_t rows) { return rows == 1 ? kWideVectors : rows <= kTileRows ? kTileVectors : 2; }
  };
};
#if defined(__AVX512BF16__)
template <>
struct StoredTiles<Float8, BFloat16> : TallTiles {};
template <>
struct StoredTiles<Signed<8>, BFloat16> : TallTiles {};
template <>
struct StoredTiles<Offset<8>, BFloat16> : TallTiles {};

// Beside zero points and masks, the registers have room for the sums of five rows.
template <>
struct StoredTiles<Offset<4>, BFloat16> {
  static constexpr int kMaxRows = 5;
  using Widths = PassWidths<kWideVectors, kTileVectors>;
};
#endif

constexpr int64_t kSpanRows = 16 * kTileRows;

// Rows up to which widening again for each tile is cheaper than widening once into memory (measured).
#if defined(__AVX512F__)
template <class Format>
constexpr int64_t kDirectRows = kSpanRows;  // always
template <>
constexpr int64_t kDirectRows<Float8> = 4 * kTileRows;
#else
template <class Format>
constexpr int64_t kDirectRows = 2 * kTileRows;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int kBits>
constexpr int64_t kDirectRows<Signed<kBits>> = kSpanRows;
template <int kBits>
constexpr int64_t kDirectRows<Offset<kBits>> = 4 * kTileRows;
#endif

// Sums of up to kSpanRows rows over all inputs: [rows, kVectors].
template <class W, class Format>
void add_rows(const InputRows<W>& inputs, int64_t num_rows, const StoredPanel<W, Format>& panel,
              const Place<StoredPanel<W, Format>::kStepBytes>& place, const Groups& groups, int64_t num_inputs,
              Floats* sums) {
  const auto row_of = [&](int64_t row) { return InputRows<W>{inputs.x + row * inputs.stride, inputs.stride}; };
  if (num_rows <= kDirectRows<Format>) {
    using Tiles = StoredTiles<Format, W>;
    const int64_t parts = num_rows <= Tiles::kMaxRows ? 1 : place.num_parts(num_rows);
    const int64_t size = parts == 1 ? num_inputs : groups.span_inputs((num_inputs + parts - 1) / parts);
    for (int64_t begin = 0; begin < num_inputs; begin += size) {
      const Span span{begin, begin + size < num_inputs ? begin + size : num_inputs, num_inputs};
      const int64_t first = begin / panel.kInputs, stop = span.end / panel.kInputs;
      for_each_pass<Tiles::kMaxRows, typename Tiles::Widths, kVectors, false>(
          place.part(first, stop), stop - first, 0, num_rows, [&](auto rows, auto vectors, int64_t row, int vector, auto ahead) {
            add_span<rows, vectors>(row_of(row), panel, groups, span, sums + row * kVectors, vector, ahead);
          });
    }
    return;
  }
  static thread_local std::vector<Column<W>> columns;
  const int64_t size = groups.span_inputs(cuts.span / (kPanel * static_cast<int64_t>(sizeof(float))));
  columns.resize(size / kStep<W> * kVectors);
  for (int64_t begin = 0; begin < num_inputs; begin += size) {
    const Span span{begin, begin + size < num_inputs ? begin + size : num_inputs, num_inputs};
    widen_span(panel, groups, span, columns.data());
    const WidenedSpan<W> widened{columns.data(), begin};
    for_each_pass<kTileRows, PassWidths<kWideVectors, kTileVectors>, kVectors, false>(
        NoPlace(), 1, 0, num_rows, [&](auto rows, auto vectors, int64_t row, int vector, auto ahead) {
          add_span<rows, vectors>(row_of(row), widened, groups, span, sums + row * kVectors, vector, ahead);
        });
  }
}

struct StoredWeight {
  const uint32_t* packed;
  const uint8_t* scales;  // [panels, num_groups, 64]
  ScaleType scale_type;
  const uint8_t* extra;  // zero points [panels, num_groups, 64], or a table of 16 floats
  int64_t group_size;
};

template <class Format, class T>
void multiply_stored(LinearCall<T> whole, const StoredWeight& weight) {
  using Panel = StoredPanel<Operand<T>, Format>;
  const int64_t steps = (whole.steps * kStep<T> + Panel::kInputs - 1) / Panel::kInputs;
  const int64_t num_inputs = steps * Panel::kInputs;  // rows have zeros behind their last input
  whole.steps = num_inputs / kStep<T>;
  with_operands(whole, [&](const LinearCall<T>& call) {
    const int64_t num_groups = (num_inputs + weight.group_size - 1) / weight.group_size;
    for_each_panel(call, steps * Panel::kStepBytes, [&](int64_t index, int64_t row, int64_t end) {
      const int64_t first = index * num_groups * kPanel;
      const Groups groups{weight.scales + first * scale_bytes(weight.scale_type), weight.scale_type, num_groups,
                          weight.group_size, 1.0f / Format::kFactor};
      const Panel panel{weight.packed + index * steps * kPanel, weight.extra + first * Format::kZeroBytes};
      const auto place = Place<Panel::kStepBytes>::of(weight.packed, index, steps);
      static thread_local std::vector<Floats> sums;
      sums.resize(kSpanRows * kVectors);
      for (; row < end; row += kSpanRows) {
        const int64_t rows = row + kSpanRows < end ? kSpanRows : end - row;
        const InputRows<Operand<T>> inputs{call.operands + row * call.operand_stride, call.operand_stride};
        add_rows(inputs, rows, panel, place, groups, num_inputs, sums.data());
        store_sums(call, row, static_cast<int>(rows), index * kPanel, kVectors, sums.data());
      }
    });
  });
}

}  // namespace
}  // namespace llmstack

#define LLMSTACK_STORED_LINEAR(format, suffix, T, Out, Format)                                                    \
  extern "C" void llmstack_linear_stored_##format##_##suffix(                                                     \
      const llmstack::T* x, int64_t num_rows, int64_t row_stride, const uint32_t* packed, const uint8_t* scales,  \
      int64_t scale_type, const uint8_t* extra, int64_t group_size, int64_t in_features, int64_t out_features,    \
      const llmstack::T* bias, const llmstack::Out* residual, llmstack::Out* out, int64_t activation) {           \
    llmstack::multiply_stored<llmstack::Format>(                                                                  \
        llmstack::LinearCall<llmstack::T>{                                                                        \
            x, num_rows, row_stride, llmstack::num_steps<llmstack::T>(in_features), out_features, bias, residual, \
            out, std::is_same_v<llmstack::Out, float>, static_cast<llmstack::Activation>(activation)},            \
        llmstack::StoredWeight{packed, scales, static_cast<llmstack::ScaleType>(scale_type), extra, group_size}); \
  }                                                                                                               \
  LLMSTACK_REPEATABLE(linear_stored_##format##_##suffix)
#define LLMSTACK_STORED_FORMAT(format, Format, BFloat)                     \
  LLMSTACK_STORED_LINEAR(format, f32, Float32, Float32, Format)            \
  LLMSTACK_STORED_LINEAR(format, bf16, BFloat, BFloat, Format)             \
  LLMSTACK_STORED_LINEAR(format, bf16_f32, BFloat, Float32, Format)        \
  LLMSTACK_STORED_LINEAR(format, f16, Float16, Float16, Format)            \
  LLMSTACK_STORED_LINEAR(format, f16_f32, Float16, Float32, Format)

LLMSTACK_STORED_FORMAT(signed8, Signed<8>, BFloat16)
LLMSTACK_STORED_FORMAT(int8, Offset<8>, BFloat16)
LLMSTACK_STORED_FORMAT(shifted8, Shifted<8>, WideBFloat16)
LLMSTACK_STORED_FORMAT(signed4, Signed<4>, BFloat16)
LLMSTACK_STORED_FORMAT(int4, Offset<4>, BFloat16)
LLMSTACK_STORED_FORMAT(shifted4, Shifted<4>, WideBFloat16)
LLMSTACK_STORED_FORMAT(fp8, Float8, BFloat16)
LLMSTACK_STORED_FORMAT(table4, Named, WideBFloat16)
