"""Quantized layers made from the published descriptions of their formats, with the weights that they stand for.

Numbers, scales and zero points are drawn first. What a layer stands for is computed from these in float64, and its
tensors are packed from them number by number, so nothing here shares code with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Layer = tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]
"""Tensors by their suffixes, and the weight [outputs, inputs] in float64."""

FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
FP4 = np.concatenate([FP4, -FP4])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(numbers: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Numbers packed along the last dimension into int32, the first in the lowest bits."""
    per_word = 32 // bits
    num_words = -(-numbers.shape[-1] // per_word)
    words = np.zeros((*numbers.shape[:-1], num_words), dtype=np.uint32)
    for index in range(numbers.shape[-1]):
        words[..., index // per_word] |= numbers[..., index].astype(np.uint32) << np.uint32(bits * (index % per_word))
    return torch.from_numpy(words.view(np.int32).copy())


def pack_nibbles(numbers: np.ndarray[Any, Any], *, is_low_first: bool) -> torch.Tensor:
    first, second = numbers[..., 0::2].astype(np.uint8), numbers[..., 1::2].astype(np.uint8)
    packed = first | second << 4 if is_low_first else first << 4 | second
    return torch.from_numpy(packed.copy())


class Draws:
    """Random parts of a layer."""

    def __init__(self, num_outputs: int, num_inputs: int, seed: int) -> None:
        self.shape = (num_outputs, num_inputs)
        self.random = np.random.default_rng(seed)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
        return self.random.integers(low, high, shape or self.shape)

    def scales(self, *shape: int, largest: float, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Such that weights are about 0.1 in size, if numbers are up to `largest`."""
        return torch.from_numpy(np.asarray(self.random.uniform(0.1, 0.2, shape) / largest)).to(dtype)


def spread(values: Any, size: int, num_inputs: int) -> np.ndarray[Any, Any]:
    """Values of groups of inputs for each input: [outputs, groups] to [outputs, inputs]."""
    array = values.double().numpy() if isinstance(values, torch.Tensor) else values
    return np.repeat(array, size, axis=1)[:, :num_inputs].astype(np.float64)


def gptq(bits: int, size: int, *, version: str = "gptq", is_symmetric: bool = True, has_order: bool = False):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        group = inputs if size == -1 else size
        num_groups = -(-inputs // group)
        half = 1 << (bits - 1)
        numbers = draws.integers(0, 2 * half)
        zeros = (
            np.full((outputs, num_groups), half) if is_symmetric else draws.integers(1, 2 * half, outputs, num_groups)
        )
        scales = draws.scales(outputs, num_groups, largest=half)
        group_ids = np.arange(inputs) // group
        if has_order:  # the groups are runs of another order of the inputs
            group_ids = group_ids[np.argsort(np.random.default_rng(7).permutation(inputs))]
        weight = (numbers - zeros[:, group_ids]) * scales.double().numpy()[:, group_ids]
        stored_zeros = zeros - 1 if version == "gptq" else zeros
        tensors = {
            "qweight": pack_words(numbers, bits).t().contiguous(),
            "qzeros": pack_words(stored_zeros.T, bits),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(group_ids.astype(np.int32)),
        }
        return tensors, weight

    return make


def awq(size: int):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        num_groups = -(-inputs // size)
        numbers, zeros = draws.integers(0, 16), draws.integers(0, 16, outputs, num_groups)
        scales = draws.scales(outputs, num_groups, largest=8)
        weight = (numbers - spread(zeros, size, inputs)) * spread(scales, size, inputs)

        def pack(values: np.ndarray[Any, Any]) -> torch.Tensor:  # [outputs, n] to [n, outputs / 8]
            columns = [8 * word + place for word in range(outputs // 8) for place in AWQ_ORDER]
            return pack_words(values.T[:, columns], 4)

        return {"qweight": pack(numbers), "qzeros": pack(zeros), "scales": scales.t().contiguous()}, weight

    return make


def fp8(kind: str, *, suffix: str = "weight_scale", block: int = 128, has_input_scale: bool = False):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        codes = draws.integers(0, 127) + 128 * draws.integers(0, 2)
        blocks = (-(-outputs // block), -(-inputs // block))
        shape: tuple[int, ...] = {"tensor": (), "channel": (outputs, 1), "block": blocks}[kind]
        scales = draws.scales(*shape, largest=120, dtype=torch.float32)
        full = scales.double().numpy()
        if kind == "block":
            full = np.kron(full, np.ones((block, block)))[:outputs, :inputs]
        weight = FP8_VALUES[codes] * full
        tensors = {"weight": torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn), suffix: scales}
        if has_input_scale:
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, weight

    return make


def packed_integers(bits: int, size: int, *, is_symmetric: bool = True, has_order: bool = False):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        group = inputs if size == -1 else size
        num_groups, half = -(-inputs // group), 1 << (bits - 1)
        numbers = draws.integers(-half, half)
        zeros = (
            np.zeros((outputs, num_groups), int) if is_symmetric else draws.integers(-half, half, outputs, num_groups)
        )
        scales = draws.scales(outputs, num_groups, largest=half, dtype=torch.bfloat16)
        group_ids = np.arange(inputs) // group
        if has_order:
            group_ids = np.random.default_rng(8).permutation(group_ids)
        weight = (numbers - zeros[:, group_ids]) * scales.double().numpy()[:, group_ids]
        tensors = {
            "weight_packed": pack_words(numbers + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = pack_words((zeros + half).T, bits).t().contiguous()
        if has_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_ids.astype(np.int32))
        return tensors, weight

    return make


def one_scale(draws: Draws) -> Layer:
    """Packed integers of 4 bits with one scale and one zero point, which the library does not pack."""
    numbers, zero = draws.integers(-8, 8), int(draws.integers(-8, 8, 1)[0])
    scale = draws.scales(1, largest=8)
    return {
        "weight_packed": pack_words(numbers + 8, 4),
        "weight_scale": scale,
        "weight_zero_point": torch.tensor([zero], dtype=torch.int8),
        "weight_shape": torch.tensor(draws.shape),
    }, (numbers - zero) * scale.double().numpy()


def gptq_by_rules(draws: Draws) -> Layer:
    """As `RULES` say: layers of 192 inputs, which are `down_proj`, have 8 bits in groups of 32."""
    make = gptq(8, 32, is_symmetric=False, has_order=True) if draws.shape[1] == 192 else gptq(4, 64)
    layer: Layer = make(draws)
    return layer


def naive_int8(draws: Draws) -> Layer:
    numbers = draws.integers(-128, 128)
    scales = draws.scales(draws.shape[0], 1, largest=128, dtype=torch.float32)
    return {
        "weight": torch.from_numpy(numbers.astype(np.int8)),
        "weight_scale": scales,
    }, numbers * scales.double().numpy()


def mxfp4(number_name: str, scale_name: str):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        numbers, exponents = draws.integers(0, 16), draws.integers(121, 127, outputs, inputs // 32)
        weight = E2M1[numbers] * spread(2.0 ** (exponents - 127), 32, inputs)
        packed = pack_nibbles(numbers, is_low_first=True)
        if number_name == "weight_blocks":
            packed = packed.view(outputs, inputs // 32, 16)
        return {number_name: packed, scale_name: torch.from_numpy(exponents.astype(np.uint8))}, weight

    return make


def bnb_4bit(kind: str, *, is_double: bool = False, size: int = 64):  # type: ignore[no-untyped-def]
    def make(draws: Draws) -> Layer:
        outputs, inputs = draws.shape
        table = {"nf4": NF4, "fp4": FP4}[kind].astype(np.float32)
        num_blocks = outputs * inputs // size
        numbers = draws.integers(0, 16)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float16", "shape": [outputs, inputs]}
        tensors: dict[str, torch.Tensor] = {}
        if is_double:
            values = np.sort(draws.random.uniform(-1, 1, 256)).astype(np.float32)
            largest = draws.random.uniform(0.1, 0.2, -(-num_blocks // 256)).astype(np.float32)
            indices = draws.integers(0, 256, num_blocks)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.4375}
            scales = values[indices].astype(np.float64) * np.repeat(largest, 256)[:num_blocks] + 0.4375
            tensors["weight.absmax"] = torch.from_numpy(indices.astype(np.uint8))
            tensors["weight.nested_quant_map"] = torch.from_numpy(values)
            tensors["weight.nested_absmax"] = torch.from_numpy(largest)
        else:
            absmax = draws.scales(num_blocks, largest=1, dtype=torch.float32)
            tensors["weight.absmax"], scales = absmax, absmax.double().numpy()
        weight = (table[numbers].astype(np.float64).reshape(-1, size) * scales[:, None]).reshape(outputs, inputs)
        text = json.dumps(state).encode()
        tensors["weight"] = pack_nibbles(numbers.reshape(1, -1), is_low_first=False).reshape(-1, 1)
        tensors["weight.quant_map"] = torch.from_numpy(table)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, weight

    return make


def bnb_8bit(draws: Draws) -> Layer:
    numbers = draws.integers(-127, 128)
    largest = draws.scales(draws.shape[0], largest=1, dtype=torch.float32)
    weight = numbers * largest.double().numpy()[:, None] / 127
    tensors = {"weight": torch.from_numpy(numbers.astype(np.int8)), "SCB": largest,
               "weight_format": torch.tensor(0, dtype=torch.uint8)}  # fmt: skip
    return tensors, weight


def fp8_of_modelopt(draws: Draws) -> Layer:
    """Scales of blocks in four dimensions."""
    tensors, weight = fp8("block")(draws)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None].contiguous()}, weight


def stored_as(dtype: torch.dtype, make: Callable[[Draws], Layer]) -> Callable[[Draws], Layer]:
    """The bytes of the numbers in another type, as FSDP shards them."""

    def remake(draws: Draws) -> Layer:
        tensors, weight = make(draws)
        return tensors | {"weight": tensors["weight"].reshape(-1).view(dtype).reshape(-1, 1)}, weight

    return remake


def auto_round(packing: str, size: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": size, "sym": True, "data_type": "int",
            "packing_format": f"auto_round:{packing}", "autoround_version": "0.8.0", "iters": 200,
            "block_name_to_quantize": "model.layers", **fields}  # fmt: skip


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(kind: str, bits: int, strategy: str, inputs: Any = None, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float" if "fp" in kind or kind.startswith("float") else "int",
               "strategy": strategy, "symmetric": True, **fields}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip


RULES = {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32, "desc_act": True}}


def gptq_config(bits: int, size: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **fields}


CASES: Mapping[str, tuple[dict[str, Any], Callable[[Draws], Layer]]] = {
    "fp8 per tensor, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("tensor", has_input_scale=True),
    ),
    "fp8 per channel": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8("channel")),
    "fp8 by block, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8("block", suffix="weight_scale_inv"),
    ),
    "fp8 of modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("tensor", has_input_scale=True)),
    "fp8 of modelopt per channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8("channel"),
    ),
    "fp8 of modelopt by block": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8_of_modelopt),
    "fp8 of modelopt by block, as others write it": (
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        fp8("block", suffix="weight_scale_inv"),
    ),
    "auto-round 4 as gptq": (auto_round("auto_gptq", 32), gptq(4, 32)),
    "auto-round 4 as gptq, others by rules": (
        auto_round(
            "auto_gptq",
            64,
            extra_config={
                "model.layers.0.self_attn.k_proj": {"bits": 16, "data_type": "float"},
                "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32, "sym": False},
            },
        ),
        gptq_by_rules,
    ),
    "auto-round as awq": (auto_round("auto_awq", 64), awq(64)),
    "nf4 stored as bfloat16": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        stored_as(torch.bfloat16, bnb_4bit("nf4")),
    ),
    "compressed w4a16": (compressed("pack-quantized", 4, "group", group_size=32), packed_integers(4, 32)),
    "compressed w4a16, asymmetric": (
        compressed("pack-quantized", 4, "group", group_size=64),
        packed_integers(4, 64, is_symmetric=False),
    ),
    "compressed w4a16 with an order": (
        compressed("pack-quantized", 4, "group", group_size=32, actorder="group"),
        packed_integers(4, 32, has_order=True),
    ),
    "compressed w4a16, last group short": (
        compressed("pack-quantized", 4, "group", group_size=128),
        packed_integers(4, 128),
    ),
    "compressed w4a16, one scale": (compressed("pack-quantized", 4, "tensor"), one_scale),
    "compressed w8a16": (compressed("pack-quantized", 8, "channel"), packed_integers(8, -1)),
    "compressed w8a16, asymmetric": (
        compressed("pack-quantized", 8, "group", group_size=64),
        packed_integers(8, 64, is_symmetric=False),
    ),
    "compressed w8a8": (compressed("int-quantized", 8, "channel", inputs=TOKENS), naive_int8),
    "compressed fp8": (compressed("float-quantized", 8, "channel"), fp8("channel")),
    "compressed fp8, naive": (
        compressed("naive-quantized", 8, "tensor", type="float") | {"quantization_status": "frozen"},
        fp8("tensor"),
    ),
    "compressed fp8 by block": (
        compressed("float-quantized", 8, "block", block_structure=[64, 64]),
        fp8("block", block=64),
    ),
    "compressed mxfp4": (
        compressed("mxfp4-pack-quantized", 4, "group", group_size=32, type="float"),
        mxfp4("weight_packed", "weight_scale"),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64)),
    "gptq 4": (gptq_config(4, 32), gptq(4, 32)),
    "gptq 4, asymmetric, version 2": (
        gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 64, version="gptq_v2", is_symmetric=False),
    ),
    "gptq 4 with an order": (
        gptq_config(4, 32, desc_act=True, sym=False),
        gptq(4, 32, is_symmetric=False, has_order=True),
    ),
    "gptq 8": (gptq_config(8, -1), gptq(8, -1)),
    "gptq 8, asymmetric": (gptq_config(8, 32, sym=False), gptq(8, 32, is_symmetric=False)),
    "gptq 4, others by rules": (gptq_config(4, 64, dynamic=RULES), gptq_by_rules),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb_4bit("nf4")),
    "nf4, double": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb_4bit("nf4", is_double=True)),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, bnb_4bit("fp4")),
    "bitsandbytes 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_8bit),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4("weight_blocks", "weight_scales")),
}
"""Name of a case to the fields of `quantization_config`, and what makes a layer."""
