"""The attention layer writes before it attends, with or without RoPE, in 16 bits or 8."""

from __future__ import annotations

import pytest
import torch

from llmstack_model_runner.layers import Attention, HeadRotation, RotaryEmbedding
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.models import load_model_class

CPU = torch.device("cpu")
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 4, 2, 16, 4
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
}


def one_prompt() -> AttentionMetadata:
    """Six tokens in blocks 3 and 1."""
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_tables=torch.tensor([[3, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([12, 13, 14, 15, 4, 5]),
        query_start_loc_list=[0, NUM_TOKENS],
        seq_lens_list=[NUM_TOKENS],
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
    )


def storage(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    key_cache, value_cache = torch.zeros(2, 5, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    return key_cache, value_cache


def make_heads() -> list[torch.Tensor]:
    return [torch.randn(NUM_TOKENS, num, HEAD_DIM) for num in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def make_layer() -> Attention:
    return Attention(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, device=CPU)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    weights = scores.masked_fill(torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(positions.float(), 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(()), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def test_keys_and_values_are_written_before_attention() -> None:
    query, key, value = make_heads()
    out = make_layer()(query, key, value, LayerStep(torch.arange(NUM_TOKENS), storage(), one_prompt(), {}))
    torch.testing.assert_close(out, expected(query, key, value))


def test_rotated_keys_are_written_and_rotated_queries_attend_to_them() -> None:
    query, key, value = make_heads()
    positions = torch.arange(NUM_TOKENS) + 7
    rotate = HeadRotation(RotaryEmbedding(RopeParameters(100.0, HEAD_DIM, 32), CPU))
    kv_cache = storage()
    out = make_layer().rotate_and_attend(rotate, query, key, value, LayerStep(positions, kv_cache, one_prompt(), {}))
    torch.testing.assert_close(out, expected(rotated(query, positions), rotated(key, positions), value))
    torch.testing.assert_close(kv_cache[0][3, :, 2], rotated(key, positions)[2])


@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1.0), (0.25, 8.0)])
def test_keys_and_values_of_8_bits_are_over_the_checkpoints_scales(key_scale: float, value_scale: float) -> None:
    layer, kv_cache = make_layer(), storage(torch.float8_e4m3fn)
    if key_scale != 1:
        slots = layer.kv_scales.slots(["k_scale"], ["v_scale"])
        slots["k_scale"].load(torch.tensor([key_scale]))
        slots["v_scale"].load(torch.tensor(value_scale))
    # Numbers that 8 bits hold, so that nothing is rounded.
    query, key, value = make_heads()[0], *torch.randint(-16, 17, (2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)).float()
    key, value = key * key_scale / 8, value * value_scale / 8
    out = layer(query, key, value, LayerStep(torch.arange(NUM_TOKENS), kv_cache, one_prompt(), {}))
    torch.testing.assert_close(out, expected(query, key, value))
    torch.testing.assert_close(kv_cache[0][3, :, 2].float() * key_scale, key[2])
    torch.testing.assert_close(kv_cache[1][1, :, 0].float() * value_scale, value[4])


def test_a_checkpoint_may_have_scales_of_some_layers_under_either_name() -> None:
    model = load_model_class("LlamaForCausalLM")(LLAMA, torch.float32, CPU)
    weights = {name: torch.zeros(slot.shape) for name, slot in model.slots().items()}
    prefix = "model.layers.1.self_attn."
    model.load_weights({**weights, f"{prefix}k_scale": torch.tensor([2.0])}.items())
    model = load_model_class("LlamaForCausalLM")(LLAMA, torch.float32, CPU)
    model.load_weights({**weights, f"{prefix}v_proj.v_scale": torch.tensor(0.5)}.items())
    with pytest.raises(ValueError, match=r"k_scale \[2\] instead of \[\]"):
        model.load_weights({**weights, f"{prefix}k_scale": torch.ones(2)}.items())


@pytest.mark.parametrize("number", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_cannot_be_are_refused(number: float) -> None:
    slots = make_layer().kv_scales.slots(["a.k_scale"], ["a.v_scale"])
    with pytest.raises(ValueError, match=r"a\.v_scale must be a positive number"):
        slots["a.v_scale"].load(torch.tensor(number))
