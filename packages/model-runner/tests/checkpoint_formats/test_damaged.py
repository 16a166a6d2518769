"""A damaged or mismatched quantized layer is refused in one sentence that names it, before anything is served."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_runner_helpers.quantized_layers import CASES, Draws

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.checkpoint_formats.read import read_quantized

Tensors = dict[str, torch.Tensor]
NAME = "model.layers.0.mlp.up_proj"
SHAPE = (64, 128)


def read(case: str, change: Callable[[Tensors], object] = lambda tensors: None) -> StoredWeight:
    fields, make = CASES[case]
    tensors, _ = make(Draws(*SHAPE, seed=0))
    change(tensors)
    named = {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}
    checkpoint = read_format({"quantization_config": fields})
    assert checkpoint is not None
    ((name, weight),) = read_quantized(checkpoint, [*named], named.__getitem__)
    assert name == f"{NAME}.weight"
    assert isinstance(weight, UnreadWeight)
    stored = weight.read()
    assert isinstance(stored, StoredWeight)
    return stored


@pytest.mark.parametrize("case", CASES)
def test_a_layer_without_damage_has_its_shape(case: str) -> None:
    assert tuple(read(case).shape) == SHAPE


def scale_suffix(tensors: Tensors) -> str:
    return next(name for name in tensors if name.rpartition(".")[2] in (
        "scales", "weight_scale", "weight_scale_inv", "absmax", "SCB", "weight_scales"))  # fmt: skip


def spoil_scale(value: float) -> Callable[[Tensors], object]:
    def spoil(tensors: Tensors) -> None:
        scales = tensors[scale_suffix(tensors)]
        scales.view(-1)[-1] = 255 if scales.dtype == torch.uint8 else value

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [name for name in CASES if name != "nf4, double"])
def test_a_scale_that_is_no_finite_number_is_refused(case: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{NAME} cannot be read as \w+: .*(NaN|infinite).*\.$"):
        read(case, spoil_scale(value))


@pytest.mark.parametrize("case", CASES)
def test_a_truncated_tensor_is_refused_or_makes_a_layer_of_another_shape(case: str) -> None:
    _, make = CASES[case]
    for suffix, whole in make(Draws(*SHAPE, seed=0))[0].items():
        if whole.ndim == 0 or suffix.startswith("weight.quant_state"):
            continue

        def cut(tensors: Tensors, suffix: str = suffix) -> None:
            tensors[suffix] = tensors[suffix][:-1]

        try:
            shape = tuple(read(case, cut).shape)
        except ValueError as error:
            assert re.fullmatch(rf"{NAME} cannot be read as \w+: .*\.", str(error))  # noqa: PT017 - one of two outcomes
        else:
            assert shape != SHAPE  # which the model refuses


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_another_type_is_refused(case: str) -> None:
    def retype(tensors: Tensors) -> None:
        name = scale_suffix(tensors)
        tensors[name] = tensors[name].double()

    with pytest.raises(ValueError, match=r"has the type float64\.$"):
        read(case, retype)


@pytest.mark.parametrize(
    ("case", "suffix", "message"),
    [
        ("gptq 4", "qzeros", "qzeros is missing"),
        ("gptq 4", "scales", "scales is missing"),
        ("awq", "qzeros", "qzeros is missing"),
        ("fp8 per channel", "weight", "weight is missing"),
        ("compressed w4a16", "weight_shape", "weight_shape is missing"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__nf4 is missing"),
        ("nf4, double", "weight.nested_absmax", "nested_absmax is missing"),
        ("mxfp4", "weight_scales", "weight_scales is missing"),
    ],
)
def test_a_missing_tensor_of_a_layer_is_named(case: str, suffix: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{message}\.$"):
        read(case, lambda tensors: tensors.pop(suffix))


def put(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({suffix: tensor})


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "gptq 4 with an order",
            put("g_idx", torch.zeros(128, dtype=torch.int32)),
            "each group 32 inputs",
        ),
        ("gptq 4 with an order", put("g_idx", torch.full((128,), -5, dtype=torch.int32)), "does not give each group"),
        ("compressed w4a16", put("weight_shape", torch.tensor([64, -1])), "does not fit weight_shape"),
        ("compressed w4a16", put("weight_shape", torch.tensor([64, 1 << 60])), "does not fit weight_shape"),
        ("fp8 per tensor, static", put("input_scale", torch.tensor(float("nan"))), "input_scale is NaN or infinite"),
        ("fp8 per channel", put("weight", torch.full(SHAPE, float("nan")).to(torch.float8_e4m3fn)), "a weight is NaN"),
        ("fp8 per channel", put("weight_scale", torch.full((64, 1), 1e38)), "a scale is too large"),
        (
            "compressed w4a16 with an order",
            put("weight_g_idx", torch.empty(0, dtype=torch.int32)),
            r"weight_g_idx has the shape \[0\] instead of \[128\]",
        ),
        (
            "compressed fp8 by block",
            put("weight_scale", torch.ones(1, 1)),
            r"weight_scale has the shape \[1, 1\] instead of \[1, 2\]",
        ),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text("{")), "is no JSON"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text("{")[None]), "is no JSON"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text("[]")), "is no JSON object"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text("x" * 5000)), "is longer than 4096 bytes"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text('{"shape": [64, 0]}')), "no pair of sizes"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", text('{"shape": [64, 128]}')), "blocksize of the state"),
        ("nf4", put("weight.quant_map", torch.full((16,), float("inf"))), "16 finite numbers"),
        (
            "bitsandbytes 8",
            put("weight_format", torch.tensor(2, dtype=torch.uint8)),
            "not that of rows",
        ),
    ],
)
def test_hostile_values_are_refused(case: str, change: Callable[[Tensors], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(case, change)


def test_a_checkpoint_without_any_quantized_layer_is_refused() -> None:
    checkpoint = read_format({"quantization_config": CASES["awq"][0]})
    assert checkpoint is not None
    with pytest.raises(ValueError, match="says awq, and no weight is quantized"):
        list(read_quantized(checkpoint, ["a.weight"], lambda name: torch.zeros(1)))


def test_layers_may_be_in_any_order_and_others_pass(tmp_path: Path) -> None:
    fields, make = CASES["gptq 4"]
    tensors, _ = make(Draws(*SHAPE, seed=0))
    named = {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}
    names = [*named]
    names = [names[2], "lm_head.weight", *names[:2], names[3]]
    named["lm_head.weight"] = torch.ones(2, 2)
    checkpoint = read_format({"quantization_config": fields})
    assert checkpoint is not None
    assert [name for name, _ in read_quantized(checkpoint, names, named.__getitem__)] == [
        f"{NAME}.weight",
        "lm_head.weight",
    ]
