"""Tile configurations of linear layers on a GPU.

They depend on the layer's shape and format, never on the number of rows.

The tables are predicted by the arithmetic below, not tuned on a card. A row's bits depend on `block_k` and
`split_k` alone, so these must not depend on the rows; stages, warps and the width of a tile of rows may.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

FORMATS = ("plain", "int8", "int4", "fp8", "fp8_block", "int4_zeros", "mxfp4")
CHUNK_SIZES: Mapping[str, int] = dict.fromkeys(FORMATS[1:], 128)
"""Inputs that a packed format stores together: one group of int8's scales, four of int4's."""

_WANTED_PROGRAMS: Mapping[str, int] = {"plain": 264, "int8": 264, "int4": 528, "fp8": 264,
                                       "fp8_block": 264, "int4_zeros": 528, "mxfp4": 528}  # fmt: skip
"""Two for each of an H200's 132 multiprocessors; four of int4's, whose tiles are small."""

_MIN_CHUNKS = 2
"""Fewest chunks of a split: with one, a program would do nothing but begin and end."""

_TILE_BYTES = 100 * 1024
"""Shared memory of a program: two fit into a multiprocessor's 227 KB (of compute capability 9.0)."""

_WIDE_TILE_BYTES = 150 * 1024
"""The same of programs that have a multiprocessor for themselves; within the 163 KB of compute capability 8.0."""

MAX_SPLIT_ROWS = 512
"""Most rows of a split. With more there are tiles enough, and a program sums all parts itself, in the same order."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The tiles of a layer and their programs.

    Attributes:
        block_k: Inputs that are read at once.
        split_k: Parts that the inputs are summed in, each by a program of its own while there are few rows.
        block_out: Outputs of a tile; 64 is the least that fills wgmma.
        num_stages: Blocks of inputs on their way at 16 rows; with more rows a block is larger, and they are fewer.
        num_warps: Warps of 32 threads per program.
    """

    block_k: int
    split_k: int
    block_out: int = 64
    num_stages: int = 6
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """The part that a program computes at once; it depends on the number of rows and decides no bits."""

    block_out: int
    block_rows: int
    num_stages: int
    num_warps: int


# (format, outputs, inputs) to a measured configuration that is better than the rule's. Empty: no GPU was measured yet.
TUNED: Mapping[tuple[str, int, int], Configuration] = {}

# What the rule gives, to be read beside a report of a card (predicted, not tuned). All with 64 outputs a tile, 4 warps
# and 6 stages; 64 inputs a block of plain weights, 128 of the others; fp8 is cut like int8.
#
#          inputs    outputs   plain: split, programs; int8: split, programs; int4: split, programs
#   GPT-2    768 ->   2304       6       216       3       108       3       108
#            768 ->    768       6        72       3        36       3        36
#            768 ->   3072       6       288       3       144       3       144
#           3072 ->    768      16       192      12       144      12       144
#   1B      2048 ->   3072       6       288       6       288       8       384
#           2048 ->   2048       8       256       8       256       8       256
#           2048 ->  16384       2       512       2       512       3       768
#           8192 ->   2048       9       288       8       256      16       512
#   8B      4096 ->   6144       3       288       3       288       6       576
#           4096 ->   4096       5       320       5       320       8       512
#           4096 ->  28672       1       448       1       448       2       896
#          14336 ->   4096       5       320       5       320       9       576
#   heads   4096 -> 128256       1      2004       1      2004       1      2004


def choose(weight_format: str, out_features: int, in_features: int, row_bits: int = 16) -> Configuration:
    """The cut of a layer: the tuned one of the table, else that of the rule.

    Args:
        weight_format: One of `FORMATS`.
        out_features: Outputs.
        in_features: Inputs.
        row_bits: Bits of an input: 16, or 32 (which has no tensor cores, and gets small blocks).
    """
    found = TUNED.get((weight_format, out_features, in_features))
    if found is not None and row_bits == 16:
        return found
    return _by_rule(weight_format, out_features, in_features, row_bits)


def choose_tile(cut: Configuration, weight_format: str, num_rows: int, row_bits: int = 16) -> Tile:
    """One tile of rows up to 64, so that the weight is read once; beyond, tiles that keep the tensor cores busy.

    Integers are widened in registers, which leaves room for 64 rows, and float32 has no tensor cores.
    """
    if weight_format == "plain" and row_bits == 16 and num_rows > 64:
        is_widest = cut.split_k == 1 and cut.block_k <= 64 and num_rows > MAX_SPLIT_ROWS
        block_rows = 256 if is_widest else 128
        num_stages = _num_stages(cut, 128, block_rows, weight_format, row_bits, _WIDE_TILE_BYTES)
        return Tile(block_out=128, block_rows=block_rows, num_stages=num_stages, num_warps=8)
    widths = (16, 32, 64) if row_bits == 16 else (16,)
    block_rows = next((width for width in widths if width >= num_rows), widths[-1])
    num_stages = _num_stages(cut, cut.block_out, block_rows, weight_format, row_bits, _TILE_BYTES)
    return Tile(cut.block_out, block_rows, num_stages, cut.num_warps)


def candidates(weight_format: str, out_features: int, in_features: int) -> Iterator[Configuration]:
    """Cuts worth measuring for a layer, the chosen one first."""
    chosen = choose(weight_format, out_features, in_features)
    yield chosen
    blocks = (64, 128) if weight_format == "plain" else (chosen.block_k,)
    num_tiles = -(-out_features // chosen.block_out)
    for block_k in blocks:
        for programs in (132, 264, 528):
            split_k = _split(-(-in_features // block_k), num_tiles, programs)
            for num_stages in (4, 6, 8):
                changed = replace(chosen, block_k=block_k, split_k=split_k, num_stages=num_stages)
                if changed != chosen:
                    yield changed


def _by_rule(weight_format: str, out_features: int, in_features: int, row_bits: int) -> Configuration:
    block_k = CHUNK_SIZES.get(weight_format, 64 if row_bits == 16 else 32)
    num_tiles = -(-out_features // 64)
    split_k = _split(-(-in_features // block_k), num_tiles, _WANTED_PROGRAMS[weight_format])
    return Configuration(block_k, split_k)


def _split(num_chunks: int, num_tiles: int, wanted_programs: int) -> int:
    """The number of parts that gives enough programs: no part without chunks, and few with too few."""
    split_k = max(1, min(-(-wanted_programs // num_tiles), num_chunks // _MIN_CHUNKS))
    chunks_per_split = -(-num_chunks // split_k)
    return -(-num_chunks // chunks_per_split)


def _num_stages(
    cut: Configuration, block_out: int, block_rows: int, weight_format: str, row_bits: int, num_bytes: int
) -> int:
    """The number of stages that fit into so much shared memory, and no more than the layer wants."""
    weight_bits = {"plain": row_bits, "int4": 4, "int4_zeros": 4, "mxfp4": 4}.get(weight_format, 8)
    stage = cut.block_k * (block_out * weight_bits + block_rows * row_bits) // 8
    return max(2, min(cut.num_stages, num_bytes // stage))
