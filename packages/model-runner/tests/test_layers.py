"""Layers take tensors in any order, in any floating type, and refuse to run without them."""

from __future__ import annotations

import pytest
import torch

from llmstack_model_runner.layers import Embedding, Linear, OutputHead
from llmstack_model_runner.layers.rotary import RopeParameters, parse_rope, rope_frequencies

CPU = torch.device("cpu")


def test_merged_parts_are_packed_once_all_have_arrived_in_any_order() -> None:
    layer = Linear(4, {"q": 3, "k": 2}, has_bias=True, dtype=torch.float32, device=CPU)
    slots = layer.slots()
    tensors = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    x = torch.randn(5, 4)
    for name in ("k.bias", "q.weight", "k.weight"):
        slots[name].load(tensors[name])
    with pytest.raises(RuntimeError, match="no weights"):
        layer(x)
    slots["q.bias"].load(tensors["q.bias"])
    weight = torch.cat((tensors["q.weight"], tensors["k.weight"]))
    bias = torch.cat((tensors["q.bias"], tensors["k.bias"]))
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias))


def test_transposed_tensors_are_read_as_the_checkpoint_stores_them() -> None:
    layer = Linear(4, {"c": 3}, has_bias=False, dtype=torch.float32, device=CPU, is_transposed=True)
    weight = torch.randn(4, 3)
    assert layer.slots()["c.weight"].shape == (4, 3)
    layer.slots()["c.weight"].load(weight)
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), x @ weight)


def test_a_tied_head_reads_the_embedding_and_asks_for_nothing() -> None:
    embedding = Embedding("wte", 7, 4, dtype=torch.bfloat16, device=CPU)
    head = OutputHead(7, 4, dtype=torch.bfloat16, device=CPU, tied_to=embedding)
    assert head.slots() == {}
    with pytest.raises(RuntimeError, match="no weights"):
        embedding(torch.tensor([1]))
    table = torch.randn(7, 4)
    embedding.slots()["wte.weight"].load(table)
    head.finish_loading()
    hidden = torch.randn(2, 4, dtype=torch.bfloat16)
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), hidden.float() @ table.bfloat16().float().t(), atol=2e-2, rtol=2e-2)


def test_rope_parameters_are_read_in_their_newer_and_older_form() -> None:
    newer = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    for config in (newer, older):
        rope = parse_rope(config, 16, 128)
        assert (rope.kind, rope.theta, rope.values["factor"]) == ("linear", 5e5, 2.0)
    assert parse_rope({}, 16, 128) == RopeParameters(10000.0, 16, 128)
    assert parse_rope({"partial_rotary_factor": 0.5}, 16, 128).rotary_dim == 8


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones() -> None:
    values = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }
    plain, _ = rope_frequencies(RopeParameters(500_000.0, 128, 1))
    scaled, factor = rope_frequencies(RopeParameters(500_000.0, 128, 1, "llama3", values))
    assert factor == 1.0
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-20:], plain[-20:] / 8)
    assert bool((scaled[1:] < scaled[:-1]).all())


def test_yarn_scales_cosines_by_its_attention_factor() -> None:
    _, factor = rope_frequencies(RopeParameters(10_000.0, 64, 4096, "yarn", {"factor": 4.0}))
    assert factor == pytest.approx(0.1 * 1.3862943611 + 1)
    _, factor = rope_frequencies(RopeParameters(1e4, 64, 4096, "yarn", {"factor": 4.0, "attention_factor": 0.7}))
    assert factor == 0.7
