"""Results have the same bits whatever the caches: cuts say how far a sum gets at a time, never its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers.attention_cases import VARIANTS, make_case, running

from llmstack_kernels.bidirectional_attention import native as bidirectional
from llmstack_kernels.caches import CacheSizes, cache_sizes, parse_cache_sizes
from llmstack_kernels.linear import BLOCK_TYPES, INT4_DYNAMIC, INT8_DYNAMIC, STORED_LAYOUTS, BlockWeight, StoredWeight
from llmstack_kernels.linear.dynamic import round_weight
from llmstack_kernels.linear.native import NativeLinear
from llmstack_kernels.linear.native_segments import pack_blocks, pack_segments
from llmstack_kernels.linear.native_stored import pack_stored
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.testing import native_variants

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = ["8K,64K,256K", "16K,256K,4K", "32K,512K,4M", "48K,1M,16M", "64K,8M,64M"]
PLAIN = "plain"
FORMS = [PLAIN, *STORED_LAYOUTS, INT8_DYNAMIC, INT4_DYNAMIC, *BLOCK_TYPES]
ANY_SIZES = st.tuples(*(st.integers(4 << 10, most) for most in (1 << 17, 1 << 21, 1 << 22)))


@pytest.fixture(params=native_variants(all_named=True), scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    chosen = NativeLibrary(request.param)
    yield chosen
    chosen.fit(cache_sizes())


def all_equal(library: NativeLibrary, sizes: list[CacheSizes], compute: Callable[[], torch.Tensor]) -> bool:
    """Whether what is computed has the same bits for these caches as for those of this processor."""
    library.fit(cache_sizes())
    expected = compute()
    assert not expected.isnan().any()
    for own in sizes:
        library.fit(own)
        if not torch.equal(compute(), expected):
            return False
    return True


def some_scales(out_features: int, num_groups: int) -> torch.Tensor:
    return (torch.rand(out_features, num_groups) + 0.5).half()


def make_layer(
    form: str, shape: tuple[int, int], group_size: int, dtype: torch.dtype, library: NativeLibrary
) -> Callable[[torch.Tensor], torch.Tensor]:
    out_features, in_features = shape
    weight, bias = torch.randn(shape), torch.randn(out_features).to(dtype)
    if form == PLAIN:
        return NativeLinear.pack(weight.to(dtype), bias, library)
    if form == INT8_DYNAMIC:
        return NativeLinear.pack_dynamic(round_weight(weight), dtype, bias, library)
    if form in BLOCK_TYPES:
        block = BLOCK_TYPES[form]
        blocks = torch.randint(0, 256, (out_features, in_features // block.num_inputs, block.num_bytes)).to(torch.uint8)
        for start in block.scales:
            blocks.view(torch.int16)[..., start // 2] = some_scales(*blocks.shape[:2]).view(torch.int16)
        return pack_blocks(BlockWeight(form, (blocks,), lambda _: pytest.fail("unread")), dtype, bias, library)
    layout = "int4" if form == INT4_DYNAMIC else form
    most = 16 if layout in ("int4", "table4") else 100
    numbers = torch.randint(0, most, shape).to(torch.uint8)
    groups = -(-in_features // group_size)
    zeros = torch.randint(0, most, (out_features, groups)).to(torch.uint8) if layout.startswith("int") else None
    table = torch.randn(16) if layout == "table4" else None
    stored = StoredWeight(layout, numbers, some_scales(out_features, groups), group_size, zeros=zeros, table=table)
    return (pack_segments if form == INT4_DYNAMIC else pack_stored)(stored, dtype, bias, library)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_of_every_form_have_the_same_bits(library: NativeLibrary, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make_layer(form, (130, 2048), 128, dtype, library)
    for num_rows in (1, 2, 5, 9, 14, 17, 31, 50, 100, 200):
        x = torch.randn(num_rows, 2048).to(dtype)
        assert all_equal(library, [parse_cache_sizes(text) for text in SIZES], lambda x=x: layer(x)), num_rows


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS[: FORMS.index(INT4_DYNAMIC)]),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 140), st.integers(1, 3000)),
    group_size=st.sampled_from([32, 64, 128, 4096]),
    num_rows=st.integers(1, 30) | st.integers(31, 450),
    sizes=st.lists(ANY_SIZES, min_size=1, max_size=3),
)
def test_any_layer_has_the_same_bits_for_any_caches(
    library: NativeLibrary,
    form: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    group_size: int,
    num_rows: int,
    sizes: list[tuple[int, int, int]],
) -> None:
    torch.manual_seed(0)
    in_group = group_size if group_size < shape[1] else shape[1]
    layer = make_layer(form, shape, in_group, dtype, library)
    x = torch.randn(num_rows, shape[1]).to(dtype)
    assert all_equal(library, [CacheSizes(*own) for own in sizes], lambda: layer(x))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(12, 12, 64), (14, 2, 64), (16, 1, 256), (6, 2, 80)]
)
def test_attention_has_the_same_bits(
    variant: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    rows = [(1, 1), (1, 70), (1, 300), (7, 65), (150, 200), (400, 400)]
    case = make_case(rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    library = NativeLibrary(variant)
    try:
        with running(variant):
            assert all_equal(library, [parse_cache_sizes(text) for text in SIZES], case.run)
    finally:
        library.fit(cache_sizes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 200])
def test_bidirectional_attention_has_the_same_bits(
    library: NativeLibrary, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bidirectional, "require_library", lambda: library)
    starts = [0, *accumulate([1, 63, 700, 130])]
    query, key, value = torch.randn(3, starts[-1], 2, head_dim).to(dtype).unbind()

    def attend() -> torch.Tensor:
        return bidirectional.bidirectional_attention(query, key, value, starts, head_dim**-0.5)

    assert all_equal(library, [parse_cache_sizes(text) for text in SIZES], attend)
