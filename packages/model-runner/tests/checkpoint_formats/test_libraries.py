"""The cases of the tests mean what the libraries of their formats say, where these are installed.

Last run with compressed-tensors 0.20.0, bitsandbytes 0.50.2 and auto-round 0.16.1. None of them is a dependency.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_runner_helpers.quantized_layers import CASES, Draws

SHAPE = (64, 128)


def made(case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    fields, make = CASES[case]
    tensors, weight = make(Draws(*SHAPE, seed=3))
    return fields, tensors, torch.from_numpy(weight)


# The library has dropped orders of inputs, which older checkpoints have.
INTEGERS_AND_FP8 = [
    name for name in CASES if name.startswith("compressed") and "mxfp4" not in name and "order" not in name
]


@pytest.mark.parametrize("case", INTEGERS_AND_FP8)
def test_compressed_tensors_agrees(case: str) -> None:
    library = pytest.importorskip("compressed_tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    fields, tensors, expected = made(case)
    given = fields["config_groups"]["group_0"]["weights"]
    scheme = library.quantization.QuantizationScheme(
        targets=["Linear"],
        weights=library.quantization.QuantizationArgs(**given | {"symmetric": "weight_zero_point" not in tensors}),
    )
    wide = {name: tensor.float() if name == "weight_scale" else tensor for name, tensor in tensors.items()}
    if wide["weight_scale"].ndim == 0:
        wide["weight_scale"] = wide["weight_scale"].reshape(1)
    found = compressors.BaseCompressor.get_value_from_registry(fields["format"]).decompress(wide, scheme)["weight"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)


def test_the_packing_of_mxfp4_in_compressed_tensors_agrees() -> None:
    library = pytest.importorskip("compressed_tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    fields, tensors, expected = made("compressed mxfp4")
    args = library.quantization.QuantizationArgs(**fields["config_groups"]["group_0"]["weights"])
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    found = compressors.MXFP4PackedCompressor.decompress(dict(tensors), scheme)["weight"]
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("case", ["nf4", "nf4, double", "fp4"])
def test_bitsandbytes_agrees_on_four_bits(case: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    _, tensors, expected = made(case)
    named = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name != "weight"}
    state = functional.QuantState.from_dict(named, torch.device("cpu"))
    state.dtype = torch.float32
    found = functional.dequantize_4bit(tensors["weight"], state)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)


def test_bitsandbytes_agrees_on_eight_bits() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    _, tensors, expected = made("bitsandbytes 8")
    found = functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_has_the_same_tables(kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    found = functional.get_4bit_type(kind, device="cpu")
    torch.testing.assert_close(found, made(kind)[1]["weight.quant_map"], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("gptq")])
def test_auto_round_agrees_on_gptq(case: str) -> None:
    fields, tensors, expected = made(case)
    is_less_one = fields.get("checkpoint_format", "gptq") == "gptq"
    module = "auto_round_extension.torch.qlinear_torch" + ("_zp" if is_less_one else "")
    layers = pytest.importorskip(module)
    layer = layers.QuantLinear(fields["bits"], fields["group_size"], SHAPE[1], SHAPE[0], bias=False, g_idx=True)
    for name, tensor in tensors.items():
        setattr(layer, name, tensor.float() if name == "scales" else tensor)
    found = layer(torch.eye(SHAPE[1]))
    torch.testing.assert_close(found.t().double(), expected, rtol=1e-6, atol=0.0)
