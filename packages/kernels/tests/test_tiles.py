"""Linear layers by the tiles of AMX have equal bits for any split of rows; a process may be refused the tiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels import build_native
from llmstack_kernels.linear import ACTIVATIONS
from llmstack_kernels.linear.dynamic import round_weight
from llmstack_kernels.linear.native_layer import NativeLinear
from llmstack_kernels.native import NativeLibrary, supported_variants

needs_tiles = pytest.mark.skipif(
    "amx" not in supported_variants(), reason="this processor has no AMX, the system refuses it, or nothing is built"
)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, variant: str = "amx") -> NativeLinear:
    return NativeLinear.pack(weight, bias, NativeLibrary(variant))


def pack_rounded(weight: torch.Tensor, bias: torch.Tensor | None = None, variant: str = "amx") -> NativeLinear:
    return NativeLinear.pack_dynamic(round_weight(weight), torch.bfloat16, bias, NativeLibrary(variant))


def make(num_rows: int, in_features: int, out_features: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, which are apart in memory, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features + 7, generator=generator).bfloat16()[:, 5 : 5 + in_features]
    return x, torch.randn(out_features, in_features, generator=generator).bfloat16()


@needs_tiles
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 100),
    in_features=st.integers(1, 700),
    out_features=st.integers(1, 200),
    cuts=st.sets(st.integers(1, 99), max_size=5),
    num_threads=st.sampled_from([1, 3]),
    packing=st.sampled_from([pack, pack_rounded]),
    activation=st.sampled_from(ACTIVATIONS),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_rows_have_equal_bits_in_any_split(
    num_rows: int, in_features: int, out_features: int, cuts: set[int], num_threads: int,
    packing: Callable[..., NativeLinear], activation: str, out_dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    x, weight = make(num_rows, in_features, out_features, seed)
    bias, residual = torch.randn(out_features).bfloat16(), torch.randn(num_rows, out_features).to(out_dtype)
    packed = packing(weight, bias)
    whole = packed(x, activation, residual, out_dtype)
    bounds = [0, *sorted(cut for cut in cuts if cut < num_rows), num_rows]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for begin, end in pairwise(bounds):
            assert torch.equal(packed(x[begin:end], activation, residual[begin:end], out_dtype), whole[begin:end])
    finally:
        torch.set_num_threads(before)


@needs_tiles
@pytest.mark.parametrize("in_features", [2, 31, 32, 33, 768, 3072, 3100])
def test_sums_are_those_of_float64_but_for_roundings_of_float32(in_features: int) -> None:
    x, weight = make(50, in_features, 130)
    found = pack(weight)(x, out_dtype=torch.float32).double()
    terms = x.double().abs() @ weight.double().abs().T
    assert ((found - x.double() @ weight.double().T).abs() <= terms * in_features * 2**-25 + 2**-126).all()


@needs_tiles
@pytest.mark.parametrize("in_features", [2, 63, 64, 768, 3100])
def test_rounded_rows_have_the_bits_of_vectors(in_features: int) -> None:
    x, weight = make(50, in_features, 130)
    by_vectors = pack_rounded(weight, variant="avx512bf16")
    assert torch.equal(pack_rounded(weight)(x, out_dtype=torch.float32), by_vectors(x, out_dtype=torch.float32))


@needs_tiles
def test_products_of_even_and_odd_inputs_are_summed_apart_in_steps_of_32() -> None:
    x, weight = make(3, 70, 20)
    products = torch.nn.functional.pad(x[:, None].float() * weight.float(), (0, 26)).view(3, 20, 3, 16, 2)
    sums = torch.zeros(3, 20)
    for step in range(3):
        chains = torch.zeros(3, 20, 2)
        for pair in range(16):  # products of bfloat16 are exact in float32, and a sum in float64 is rounded once
            chains = (chains.double() + products[:, :, step, pair].double()).float()
        sums += chains.sum(-1)
    assert torch.equal(pack(weight)(x, out_dtype=torch.float32), sums)


@needs_tiles
def test_infinite_inputs_and_weights_disturb_no_other_row_or_column() -> None:
    x, weight = make(40, 70, 100)
    expected = pack(weight)(x)
    x[33, 69], weight[64, 68] = float("inf"), float("nan")
    found = pack(weight)(x)
    assert found[33].isfinite().sum() == 0
    assert found[:, 64].isnan().all()
    rows, columns = torch.arange(40) != 33, torch.arange(100) != 64
    assert torch.equal(found[rows][:, columns], expected[rows][:, columns])


# A thread with a signal stack that could not hold the tiles: then the system refuses them to the process.
REFUSED = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(1 << 12)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
from llmstack_kernels.build_native import runnable_variants, tiles_refusal
from llmstack_kernels.native import library
print(runnable_variants()[0], bool(tiles_refusal()), library(), sep="; ")
"""


@needs_tiles
def test_a_process_that_may_not_use_tiles_says_so_and_computes_with_vectors() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert done.stdout == "avx512bf16; True; avx512bf16, AMX refused\n"
    assert "refuses it to this process" in done.stderr


def test_the_variant_shares_a_library_and_is_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_native.library_path("amx") == build_native.library_path("avx512bf16")
    monkeypatch.setattr(build_native, "machine", lambda: "x86_64")
    features = build_native._REQUIRED_FEATURES["amx"] | build_native._REQUIRED_FEATURES["avx2"]
    monkeypatch.setattr(build_native, "_processor_features", lambda: features)
    monkeypatch.setattr(build_native, "tiles_refusal", lambda: "")
    assert build_native.runnable_variants() == ["amx", "avx512bf16", "avx512", "avx2", "portable"]
    monkeypatch.setattr(build_native, "tiles_refusal", lambda: "Operation not permitted")
    assert build_native.runnable_variants()[0] == "avx512bf16"
    monkeypatch.setattr(build_native, "_processor_features", lambda: features - {"amx_tile"})
    assert "amx" not in build_native.runnable_variants()
