"""Every variant of the native kernels equals the reference, on rows of any length and in every type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from llmstack_kernels import (
    activation,
    build_native,
    layer_norm,
    reference,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
)
from llmstack_kernels.activation import native as native_activation
from llmstack_kernels.layer_norm import native as native_layer_norm
from llmstack_kernels.linear import pack_linear
from llmstack_kernels.native import NativeLibrary, StaleLibraryError, library
from llmstack_kernels.reshape_and_cache import native as native_cache
from llmstack_kernels.rms_norm import native as native_rms_norm
from llmstack_kernels.rotary_embedding import native as native_rotary
from llmstack_kernels.testing import native_variants

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZES = [1, 15, 16, 64, 100]
MODULES = [native_activation, native_cache, native_layer_norm, native_rms_norm, native_rotary]

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


@pytest.fixture(params=native_variants())
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = NativeLibrary(request.param)
    for module in MODULES:
        monkeypatch.setattr(module, "require_library", lambda: chosen)
    return str(request.param)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_the_reference(variant: str, dtype: torch.dtype, size: int) -> None:
    x, residual, weight, bias = (torch.randn(*shape).to(dtype) for shape in [(40, size)] * 2 + [(size,)] * 2)
    assert_equal(native_layer_norm.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    assert_equal(native_layer_norm.layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))
    for scale in (weight, weight.float()):
        assert_equal(native_rms_norm.rms_norm(x, scale, 1e-5), reference.rms_norm(x, scale, 1e-5))
        found = native_rms_norm.fused_add_rms_norm(x, residual, scale, 1e-5)
        expected = reference.fused_add_rms_norm(x, residual, scale, 1e-5)
        assert torch.equal(found[1], expected[1])
        assert_equal(found[0], expected[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_equal_the_reference(variant: str, dtype: torch.dtype, size: int) -> None:
    x = torch.cat((torch.randn(2000, size) * 4, torch.full((1, size), 200.0), torch.full((1, size), -200.0))).to(dtype)
    for name in ("relu", "relu_squared", "gelu", "gelu_tanh"):
        assert_equal(getattr(native_activation, name)(x), getattr(reference, name)(x))
    gated = torch.cat((x, torch.randn(x.shape).to(dtype)), dim=-1)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        assert_equal(getattr(native_activation, name)(gated), getattr(reference, name)(gated))
    for factors in (torch.randn(x.shape[-1]), torch.tensor([0.3])):
        assert_equal(native_activation.multiply_columns(x, factors), reference.multiply_columns(x, factors))
    capped, expected = x.float(), x.float()
    native_activation.soft_cap_(capped, 30.0)
    reference.soft_cap_(expected, 30.0)
    torch.testing.assert_close(capped, expected, atol=2e-5, rtol=2e-5)
    x[3] = float("nan")
    assert native_activation.relu(x)[3].isnan().all()


def test_exact_gelu_errs_by_the_rounding_of_one_alone(variant: str) -> None:
    x = torch.cat((torch.linspace(-7, 7, 2_000_003), torch.tensor([0.9, 4.0]) * 2**0.5, torch.tensor([1e4, 3e38])))
    for own in (x, -x):
        exact = own.double() * (1 + torch.erf(own.double() / 2**0.5)) / 2
        errors = (native_activation.gelu(own[None])[0].double() - exact).abs()
        assert (errors <= 1.5 * 2**-23 * own.abs()).all()
    odd = native_activation.gelu(torch.tensor([[0.0, torch.inf, torch.nan, -torch.nan]]))[0]
    assert odd[:2].tolist() == [0, torch.inf]
    assert odd[2:].isnan().all()


def test_exact_gelu_has_the_same_bits_at_any_place_of_a_row(variant: str) -> None:
    x = 3 * torch.randn(1, 100)
    expected = native_activation.gelu(x)
    for begin in (0, 1, 7, 64, 83):
        for end in (begin + 1, begin + 5, begin + 16, 100):
            assert torch.equal(native_activation.gelu(x[:, begin:end].contiguous()), expected[:, begin:end])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_slices_of_a_projection_equal_the_reference(variant: str, dtype: torch.dtype, size: int) -> None:
    projected = (torch.randn(40, 3 * size + 5) * 4).to(dtype)
    x, gate = torch.randn(40, 3 * size).to(dtype), projected[:, 5:]
    for opened in (gate, projected[:, 2:3]):
        assert_equal(native_activation.sigmoid_gate(x, opened), reference.sigmoid_gate(x, opened))
        assert_equal(native_activation.silu_gate(x, opened), reference.silu_gate(x, opened))
    weights, (heads, gates) = torch.randn(3, size).to(dtype), (part.view(40, 3, size) for part in (x, gate))
    tolerance = 4 * TOLERANCES[dtype]
    for weight, is_gated_first in ((weights[0], False), (weights, True)):
        found = native_rms_norm.gated_rms_norm(heads, gates, weight, 1e-6, is_gated_first)
        expected = reference.gated_rms_norm(heads, gates, weight, 1e-6, is_gated_first)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        row = native_rms_norm.gated_rms_norm(heads[7:8], gates[7:8], weight, 1e-6, is_gated_first)
        assert torch.equal(row, found[7:8])


@pytest.mark.parametrize("rotary_dim", [16, 20, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotations_of_slices_of_a_projection_equal_the_reference(
    variant: str, dtype: torch.dtype, rotary_dim: int
) -> None:
    projected = torch.randn(70, (4 + 2 + 2) * 32).to(dtype)
    query, key, _ = (part.view(70, -1, 32) for part in projected.split([128, 64, 64], dim=-1))
    positions = torch.randint(0, 100, (70,))
    table = torch.randn(100, rotary_dim)
    found = native_rotary.rotary_embedding(positions, query, key, table)
    expected = reference.rotary_embedding(positions, query, key, table)
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])


@pytest.mark.parametrize("num_tokens", [1, 37, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache_writes_equal_the_reference(variant: str, dtype: torch.dtype, num_tokens: int) -> None:
    projected = torch.randn(num_tokens, 8, 16).to(dtype)
    key, value = projected[:, :3], projected[:, 4:7]
    slots = torch.arange(5, 5 + num_tokens) + 8
    shape = (num_tokens // 8 + 4, 3, 8, 16)
    found = [torch.ones(shape, dtype=dtype) for _ in range(2)]
    expected = [torch.ones(shape, dtype=dtype) for _ in range(2)]
    native_cache.reshape_and_cache(key, value, *found, slots)
    reference.reshape_and_cache(key, value, *expected, slots)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("op", [activation, layer_norm, reshape_and_cache, rms_norm, rotary_embedding])
def test_every_operation_runs_natively_and_says_so(op: ModuleType) -> None:
    from llmstack_kernels.dispatch import backends

    assert str(library()) in backends("cpu")[op.__name__.rpartition(".")[2]]


def test_callers_on_several_threads_share_the_pool_and_are_isolated() -> None:
    x = torch.randn(64, 512)
    layers = [pack_linear(torch.randn(512, 512)) for _ in range(4)]
    expected = [layer(x) for layer in layers]

    def calls_are_right(index: int) -> bool:
        return all(torch.equal(layers[index](x), expected[index]) for _ in range(200))

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(calls_are_right, range(4)))
    finally:
        torch.set_num_threads(before)


def test_a_stale_library_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    find = library.__wrapped__  # without the cache: operations keep the library that they have found
    monkeypatch.setattr(build_native, "_COMMON_FLAGS", ("-O0",))
    monkeypatch.delenv("LLMSTACK_KERNELS", raising=False)
    assert not any(map(build_native.is_built, build_native.variants()))
    with pytest.raises(StaleLibraryError, match="older than their sources: run 'make setup'"):
        find()
    monkeypatch.setenv("LLMSTACK_KERNELS", "reference")
    assert find() is None


def test_without_a_compiler_the_build_says_what_is_missing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_native, "find_compiler", lambda: None)
    with pytest.raises(build_native.BuildError, match="compiler"):
        build_native.build(folder=tmp_path)
