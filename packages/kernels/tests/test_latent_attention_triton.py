"""Attention over latents on a GPU, or in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from kernel_helpers.latent_cases import TOLERANCES, exact, make_inputs

from llmstack_kernels.float8_cache import STORED_TYPE
from llmstack_kernels.paged_attention import AttentionInputs, reference
from llmstack_kernels.paged_attention import triton as kernels
from llmstack_kernels.paged_attention.triton_latent import is_latent

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
SIZES = (48, 32)


def on(device: str, inputs: AttentionInputs) -> AttentionInputs:
    cache = inputs.key_cache.to(device)
    names = ("query", "query_start_loc", "seq_lens", "block_tables")
    tensors = {name: getattr(inputs, name).to(device) for name in names}
    return inputs._replace(key_cache=cache, value_cache=cache[..., : inputs.value_cache.shape[3]], **tensors)


@pytest.mark.parametrize("num_heads", [3, 20])
@pytest.mark.parametrize("sizes", [SIZES, (100, 80)], ids=str)
def test_decodes_and_prompts_agree_with_float64(
    sizes: tuple[int, int], num_heads: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs = make_inputs([(1, 1), (1, 75), (5, 70), (3, 3)], num_heads, sizes, triton_dtype)
    assert is_latent(inputs)
    out = kernels.paged_attention(on(triton_device, inputs))
    tolerance = TOLERANCES[triton_dtype]
    torch.testing.assert_close(out.cpu().double(), exact(inputs), atol=tolerance, rtol=tolerance)


def test_bits_do_not_depend_on_the_batch_and_the_cut(triton_device: str) -> None:
    inputs = on(triton_device, make_inputs([(9, 60), (1, 40)], 4, SIZES, torch.float32))
    whole = kernels.paged_attention(inputs)
    for token in (0, 4, 8):
        one = inputs._replace(
            query=inputs.query[token : token + 1],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=triton_device),
            seq_lens=torch.tensor([52 + token], dtype=torch.int32, device=triton_device),
            block_tables=inputs.block_tables[:1],
            query_start_loc_list=None,
            seq_lens_list=None,
            max_query_len=1,
        )
        assert torch.equal(kernels.paged_attention(one)[0], whole[token])


def test_latents_of_8_bits_are_multiplied_by_their_scale(triton_device: str) -> None:
    inputs = make_inputs([(1, 30), (4, 20)], 3, SIZES, torch.float32)
    stored, scale = inputs.key_cache.to(STORED_TYPE), torch.tensor([0.5], device=triton_device)
    inputs = on(triton_device, inputs._replace(key_cache=stored))._replace(key_scale=scale, value_scale=scale)
    expected = reference.paged_attention(inputs)
    torch.testing.assert_close(kernels.paged_attention(inputs), expected, atol=3e-6, rtol=3e-6)


def test_values_in_memory_of_their_own_go_through_the_reference(triton_device: str) -> None:
    inputs = on(triton_device, make_inputs([(2, 20)], 3, SIZES, torch.float32))
    apart = inputs._replace(value_cache=inputs.value_cache.clone())
    assert not is_latent(apart)
    assert torch.equal(kernels.paged_attention(apart), reference.paged_attention(inputs))
