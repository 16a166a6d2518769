"""Reading of adapters in peft's format, all of them checked before use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from llmstack_kernels.low_rank import LowRankAdapter, LowRankFactors
from llmstack_model_files import ModelFilesError, TensorInfo, check_safetensors_content, parse_json_object, read_adapter
from llmstack_model_files.adapter_files import WEIGHTS_NAME
from llmstack_model_runner.adapters.config import AdapterConfig, AdapterError, read_adapter_config
from llmstack_model_runner.layers.adaptation import AdaptedLayers, AdaptedPart, ReadRows
from llmstack_model_runner.models.base import Model

_PREFIX = r"(?:base_model\.model\.)?(?P<module>[^\0]{1,256}?)\."
_TENSOR_NAMES = (
    re.compile(_PREFIX + r"lora_(?P<factor>[AB])(?:\.default)?\.weight"),
    re.compile(_PREFIX + r"lora_(?P<factor>embedding_[AB])(?:\.default)?"),
    re.compile(_PREFIX + r"(?P<factor>base_layer)\.weight"),  # of an embedding or a head, which peft stores with it
)
_WHOLE = "whole"  # in place of a factor
_WHOLE_NAME = re.compile(_PREFIX + r"(?:modules_to_save\.(?:default\.)?)?weight")
_DTYPES = frozenset({"F32", "F16", "BF16"})
_INNER = ".base_layer"  # a wrapper of peft within another one of the same module
_ROWS_AT_ONCE = 4096
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of an adapter."""

    max_rank: int
    max_bytes: int


class _Pair(NamedTuple):
    part: AdaptedPart
    scale: float
    names: tuple[str, ...]  # of two factors, or of the whole matrix
    base: str | None  # the tensor of the matrix itself
    expert: tuple[int, int] | None = None  # number of the matrix among so many, whose factors lie side by side


def load_adapter(
    folder: Path,
    digest: str,
    model: Model,
    layers: AdaptedLayers,
    place: tuple[torch.dtype, torch.device],
    limits: AdapterLimits,
) -> LowRankAdapter:
    """Reads an adapter for the layers of a model; may run in any thread.

    `digest` is what its files had when they were checked; empty for none. `place`: Type and device of the factors.

    Raises:
        AdapterError: It is damaged, does not fit the model or uses what is not supported.
        torch.OutOfMemoryError: It does not fit on the device.
    """
    dtype, device = place
    try:
        files = read_adapter(folder, limits.max_bytes)
        config = read_adapter_config(parse_json_object(files.config, "adapter_config.json"))
        infos = check_safetensors_content(files.weights, WEIGHTS_NAME)
    except ModelFilesError as error:
        raise AdapterError(str(error)) from error
    if digest and files.digest != digest:
        raise AdapterError("The adapter's files have changed since it was loaded; load it again.")
    pairs = _find_pairs(infos, config, model, layers, limits)
    try:
        tensors = load_tensors(files.weights)
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{WEIGHTS_NAME} cannot be read as safetensors.") from error
    found: list[list[LowRankFactors]] = [[] for _ in range(layers.num_layers)]
    with torch.inference_mode():
        for pair in pairs:
            _check_base(pair, tensors)
            if pair.part.is_loaded():
                found[pair.part.layer].append(_factors(pair, tensors, dtype))
        return LowRankAdapter(found, device)


def _find_pairs(
    infos: Mapping[str, TensorInfo], config: AdapterConfig, model: Model, layers: AdaptedLayers, limits: AdapterLimits
) -> list[_Pair]:
    """The pairs of factors, of which names, types and shapes are right."""
    module_to_names: dict[str, dict[str, str]] = {}
    for name, info in infos.items():
        module, factor = _split(name, config)
        if info.dtype not in _DTYPES:
            raise AdapterError(f"{name[:128]} is stored as {info.dtype}; F32, F16 and BF16 are supported.")
        if module_to_names.setdefault(module, {}).setdefault(factor, name) != name:
            raise AdapterError(f"The adapter has {name[:128]} under another name too.")
    pairs = _stacked_pairs(module_to_names, infos, config, model, layers, limits)
    pairs += [
        _check_pair(module, _find_part(module, model, layers), names, infos, config, limits)
        for module, names in module_to_names.items()
    ]
    if not pairs:
        raise AdapterError("The adapter has no tensors.")
    name, count = Counter(pair.part.name for pair in pairs).most_common(1)[0]
    if count > 1:
        raise AdapterError(f"The adapter changes {name[:128]} under several names.")
    wholes = [f".{module}" for module, names in module_to_names.items() if _WHOLE in names]
    for name in config.whole_names:
        if not any(module.endswith(f".{name}") for module in wholes):
            raise AdapterError(f"The adapter has no tensor for {name[:64]}, which modules_to_save names.")
    return pairs


def _split(name: str, config: AdapterConfig) -> tuple[str, str]:
    """A tensor's module, and which factor of its update it is."""
    for pattern in _TENSOR_NAMES:
        if (match := pattern.fullmatch(name)) is not None:
            return match["module"], match["factor"]
    match = _WHOLE_NAME.fullmatch(name)
    if match is None or not config.is_whole(match["module"]):
        raise AdapterError(_why_not_a_factor(name))
    return match["module"], _WHOLE


def _stacked_pairs(
    module_to_names: dict[str, dict[str, str]],
    infos: Mapping[str, TensorInfo],
    config: AdapterConfig,
    model: Model,
    layers: AdaptedLayers,
    limits: AdapterLimits,
) -> list[_Pair]:
    """The pairs of all experts of each parameter, which are taken out of `module_to_names`.

    peft wraps a module once for each of its parameters: the last one has the name of the module, and each before it is
    one `base_layer` further in.
    """
    pairs: list[_Pair] = []
    found: list[str] = []
    for outer in [module for module in module_to_names if not module.endswith(_INNER)]:
        stacks = _find(layers.stacks, outer, model)
        parameters = [name for name in stacks or {} if config.is_parameter(f"{outer}.{name}")]
        if stacks is None or not parameters:
            continue
        for depth, name in enumerate(reversed(parameters)):
            names = module_to_names.pop(outer + depth * _INNER, {})
            pairs += _stacked(f"{outer}.{name}", stacks[name], names, infos, config, limits)
        found += [f"{outer}.{name}" for name in parameters]
    for name in config.parameter_names:
        if not any(parameter.endswith(f".{name}") for parameter in found):
            raise AdapterError(
                f"The adapter has no experts of this model for {name[:64]}, which target_parameters names."
            )
    return pairs


def _stacked(
    parameter: str,
    parts: Sequence[AdaptedPart],
    names: Mapping[str, str],
    infos: Mapping[str, TensorInfo],
    config: AdapterConfig,
    limits: AdapterLimits,
) -> list[_Pair]:
    """The pairs of a parameter: the first factors of all experts are rows, in turns their second factors columns."""
    if names.keys() != {"A", "B"}:
        raise AdapterError(f"{parameter[:128]} needs the factors lora_A and lora_B, and no others.")
    rank, count, part = _rank_of(parameter, config, limits), len(parts), parts[0]
    _check_shapes(names, {"A": (count * rank, part.in_features), "B": (part.out_features, rank * count)}, infos)
    scale, both = config.scale_of(parameter), (names["A"], names["B"])
    return [_Pair(own, scale * own.scale, both, None, (number, count)) for number, own in enumerate(parts)]


def _check_pair(
    module: str,
    part: AdaptedPart,
    names: Mapping[str, str],
    infos: Mapping[str, TensorInfo],
    config: AdapterConfig,
    limits: AdapterLimits,
) -> _Pair:
    if _WHOLE in names and (part.read_base is None or len(names) == 1):
        return _check_whole(names[_WHOLE], infos[names[_WHOLE]], part)
    factors = ("embedding_A", "embedding_B") if part.is_embedding else ("A", "B")
    if names.keys() - {"base_layer"} != set(factors):
        raise AdapterError(f"{module[:128]} needs the factors lora_{factors[0]} and lora_{factors[1]}, and no others.")
    if not config.is_target(module):
        raise AdapterError(f"{module[:128]} is none of the target_modules of adapter_config.json.")
    rank = _rank_of(module, config, limits)
    shapes: dict[str, tuple[int, ...]] = {factors[0]: (rank, part.in_features), factors[1]: (part.out_features, rank)}
    if "base_layer" in names:
        is_table = part.is_embedding
        shapes["base_layer"] = (part.in_features, part.out_features)[:: 1 if is_table else -1]
    _check_shapes(names, shapes, infos)
    scale = config.scale_of(module) * part.scale
    return _Pair(part, scale, (names[factors[0]], names[factors[1]]), names.get("base_layer"))


def _rank_of(name: str, config: AdapterConfig, limits: AdapterLimits) -> int:
    rank = config.rank_of(name)
    if rank > limits.max_rank:
        raise AdapterError(f"{name[:128]} has the rank {rank}; --max-lora-rank is {limits.max_rank}.")
    return rank


def _check_shapes(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], infos: Mapping[str, TensorInfo]
) -> None:
    """Checks the tensors of a pair, by their factors."""
    for factor, shape in shapes.items():
        given = infos[names[factor]].shape
        if given != shape:
            raise AdapterError(f"{names[factor][:128]} has the shape {list(given)[:4]} instead of {list(shape)}.")


def _check_whole(name: str, info: TensorInfo, part: AdaptedPart) -> _Pair:
    """A matrix that replaces that of the model: an update of full rank."""
    if part.read_base is None:
        raise AdapterError(
            f"{name[:128]} is a whole matrix (modules_to_save); only embedding and head are supported, on one CPU."
        )
    shape = (part.in_features, part.out_features)[:: 1 if part.is_embedding else -1]
    if info.shape != shape:
        raise AdapterError(f"{name[:128]} has the shape {list(info.shape)[:4]} instead of {list(shape)}.")
    return _Pair(part, part.scale, (name,), None)


def _check_base(pair: _Pair, tensors: Mapping[str, torch.Tensor]) -> None:
    """peft stores embeddings and heads that have an update, and would replace those of the model by them."""
    if pair.base is not None and (pair.part.is_base is None or not pair.part.is_base(tensors[pair.base])):
        raise AdapterError(
            f"{pair.base[:128]} differs from the model's own; save the adapter with save_embedding_layers=False."
        )


def _find_part(module: str, model: Model, layers: AdaptedLayers) -> AdaptedPart:
    part = _find(layers.parts, module, model)
    if part is None:
        raise AdapterError(f"The adapter changes {module[:128]}, which is no linear layer or embedding of this model.")
    return part


def _find(found: Mapping[str, _Found], module: str, model: Model) -> _Found | None:
    """The tensors of a module, by its name in an adapter."""
    renamed = model.rename(f"{module}.weight").removesuffix(".weight")
    return found.get(renamed) or found.get(f"{model.root}{renamed}")


def _why_not_a_factor(name: str) -> str:
    shown = name[:128]
    if "lora_magnitude_vector" in name:
        return f"The adapter uses DoRA ({shown}), which is not supported."
    if name.endswith(".bias"):
        return f"The adapter has a bias ({shown}), which is not supported."
    return f"The adapter has the tensor {shown}, which is no factor of a low-rank update."


def _factors(pair: _Pair, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> LowRankFactors:
    """This rank's part of a pair, the scale in its second factor; of a whole matrix the difference and a unit one."""
    part = pair.part
    if part.read_base is not None and len(pair.names) == 1:
        unit = torch.eye(part.whole_rank, dtype=dtype)
        difference = _difference(pair, part.read_base(), tensors, dtype)
        a, b = (difference, unit) if part.is_embedding else (unit, difference)
    else:
        a, b = (tensors[name] for name in pair.names)
        if pair.expert is not None:
            number, count = pair.expert
            a, b = a.chunk(count)[number], b[:, number::count]
        if part.inputs is not None:
            a = a[:, part.inputs.start : part.inputs.stop]
        a = a.to(dtype, copy=True).contiguous()
        b = (part.outputs(b).float() * pair.scale).t().to(dtype).contiguous()
    for name, factor in zip((*pair.names, pair.names[0]), (a, b), strict=False):
        if not bool(torch.isfinite(factor).all()):
            raise AdapterError(f"{name[:128]} has values that are NaN, infinite or too large for {dtype}.")
    return LowRankFactors(a, b, part.first_output)


def _difference(pair: _Pair, base: ReadRows, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The addition of a whole matrix to the model's, transposed; some rows at a time, since float32 takes memory."""
    whole = tensors[pair.names[0]]
    difference = torch.empty(whole.shape[::-1], dtype=dtype)
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, len(whole)))
        update = (whole[rows.start : rows.stop].float() - base(rows)) * pair.scale
        difference[:, rows.start : rows.stop] = update.t()
    return difference
