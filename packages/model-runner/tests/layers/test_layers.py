"""Layers take tensors in any order, in any floating type, and refuse to run without them."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels.linear import packing_version
from llmstack_model_runner.layers import Embedding, Linear, OutputHead, RMSNorm
from llmstack_model_runner.layers.attention import alibi_slopes
from llmstack_model_runner.layers.packing import packed_linears
from llmstack_model_runner.layers.rotary import RopeParameters, RotaryEmbedding, parse_rope, rope_frequencies

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


def test_rows_of_a_part_are_read_in_the_order_given() -> None:
    order = torch.tensor([2, 0, 1])
    layer = Linear(4, {"q": 3, "k": 2}, has_bias=True, dtype=torch.float32, device=CPU, part_to_row_order={"q": order})
    tensors = {name: torch.randn(slot.shape) for name, slot in layer.slots().items()}
    for name, slot in layer.slots().items():
        slot.load(tensors[name])
    weight = torch.cat((tensors["q.weight"][order], tensors["k.weight"]))
    bias = torch.cat((tensors["q.bias"][order], tensors["k.bias"]))
    x = torch.randn(5, 4)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias))


def test_a_head_adds_its_bias_and_caps_its_logits() -> None:
    head = OutputHead(7, 4, dtype=torch.float32, device=CPU, has_bias=True, soft_cap=1.5)
    tensors = {name: torch.randn(slot.shape) * 3 for name, slot in head.slots().items()}
    for name, slot in head.slots().items():
        slot.load(tensors[name])
    head.finish_loading()
    hidden = torch.randn(3, 4)
    expected = 1.5 * torch.tanh((hidden @ tensors["lm_head.weight"].t() + tensors["lm_head.bias"]) / 1.5)
    torch.testing.assert_close(head(hidden), expected)


def test_an_embedding_is_scaled_by_a_number_of_its_own_type() -> None:
    embedding = Embedding("wte", 7, 4, dtype=torch.bfloat16, device=CPU, scale=3072**0.5)
    table = torch.randn(7, 4).bfloat16()
    embedding.slots()["wte.weight"].load(table)
    assert torch.equal(embedding(torch.tensor([3])), table[3:4] * torch.tensor(55.5).bfloat16())


def test_a_norm_that_stores_its_scale_less_1_keeps_it_in_float32() -> None:
    norm = RMSNorm("norm", 8, 1e-6, dtype=torch.bfloat16, device=CPU, is_offset=True)
    stored, x = torch.randn(8).bfloat16(), torch.randn(3, 8).bfloat16()
    norm.slots()["norm.weight"].load(stored)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + stored.float())
    assert torch.equal(norm(x), expected.bfloat16())


def test_alibi_slopes_are_powers_of_one_base() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-power for power in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(6)[:4], torch.tensor([2.0**-power for power in (2, 4, 6, 8)]))
    torch.testing.assert_close(alibi_slopes(6)[4:], torch.tensor([2.0**-1, 2.0**-3]))


def test_a_tied_head_reads_the_embedding_and_asks_for_nothing() -> None:
    embedding = Embedding("wte", 7, 4, dtype=torch.bfloat16, device=CPU)
    head = OutputHead(7, 4, dtype=torch.bfloat16, device=CPU, tied_to=embedding)
    assert head.slots() == {}
    with pytest.raises(RuntimeError, match="no table"):
        embedding(torch.tensor([1]))
    table = torch.randn(7, 4)
    embedding.slots()["wte.weight"].load(table)
    head.finish_loading()
    hidden = torch.randn(2, 4, dtype=torch.bfloat16)
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), hidden.float() @ table.bfloat16().float().t(), atol=2e-2, rtol=2e-2)
    assert torch.equal(embedding(torch.tensor([6, 0])), table[[6, 0]].bfloat16())


@pytest.mark.skipif(not packing_version("cpu"), reason="needs the native kernels, which look up in packed weights")
def test_a_table_that_a_head_has_as_it_is_is_kept_once() -> None:
    embedding = Embedding("wte", 7, 4, dtype=torch.bfloat16, device=CPU, scale=1.5)
    head = OutputHead(7, 4, dtype=torch.bfloat16, device=CPU, tied_to=embedding)
    table = torch.randn(7, 4).bfloat16()
    embedding.slots()["wte.weight"].load(table)
    head.finish_loading()
    assert torch.equal(embedding(torch.tensor([6, 0])), table[[6, 0]] * 1.5)
    with pytest.raises(RuntimeError, match="no table"):
        _ = embedding.weight


def test_a_table_is_kept_beside_a_rounded_head() -> None:
    with packed_linears("int8"):
        embedding = Embedding("wte", 7, 4, dtype=torch.bfloat16, device=CPU)
        head = OutputHead(7, 4, dtype=torch.bfloat16, device=CPU, tied_to=embedding)
        table = torch.randn(7, 4).bfloat16()
        embedding.slots()["wte.weight"].load(table)
        head.finish_loading()
    assert torch.equal(embedding(torch.tensor([6, 0])), table[[6, 0]])
    assert torch.equal(embedding.weight, table)


def test_rope_parameters_are_read_in_their_newer_and_older_form() -> None:
    newer = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    for config in (newer, older):
        rope = parse_rope(config, 16, 128)
        assert (rope.kind, rope.theta, rope.values["factor"]) == ("linear", 5e5, 2.0)
    assert parse_rope({}, 16, 128) == RopeParameters(10000.0, 16, 128)
    assert parse_rope({"partial_rotary_factor": 0.5}, 16, 128, is_partial=True).rotary_dim == 8


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


def test_angles_are_computed_for_the_served_context_and_what_the_cache_holds_of_it() -> None:
    rotary = RotaryEmbedding(RopeParameters(10_000.0, 128, 1 << 40), torch.device("cpu"))  # half a petabyte
    rotary.hold_positions(70_000)  # more than are computed at once
    held = rotary.table
    assert held.shape == (70_000, 128)
    rotary.hold_positions(16)
    assert rotary.table is held
    rotary.limit_positions(16)
    rotary.hold_positions(70_000)
    assert torch.equal(rotary.table, held[:16])
    angles = torch.tensor([65_536.0, 69_999.0])  # of the pair of dimensions that turns by one radian
    torch.testing.assert_close(held[[65_536, 69_999], 0], angles.cos())
