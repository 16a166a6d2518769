"""The quantization that a config.json describes; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmstack_types.vocabulary import CheckpointQuantization, words_of

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
SMALL_FILE_BYTES = 256 << 20
"""Layers of smaller GGUF files take exact inputs by default. A step of such a model is short in any case, and its
tokens are often nearly as likely as others: rounded, SmolLM2-135M begins 2 of 20 answers otherwise."""
_MAX_GROUP_SIZE = 1 << 20
_METHOD_ALIASES: Mapping[str, str] = {"fbgemm_fp8": "fp8", "modelopt": "fp8", "bitsandbytes_4bit": "bitsandbytes",
                                      "bitsandbytes_8bit": "bitsandbytes"}  # fmt: skip
_INTEGER_METHODS = ("awq", "gptq", "compressed-tensors")
_AUTO_ROUND_FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq")


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How the weights of a checkpoint are quantized.

    Attributes:
        method: One of `CheckpointQuantization`.
        num_bits: Bits of a weight; in mixed checkpoints, the least.
        config: The configuration's own fields.
        field: Where it was found, for messages.
    """

    method: str
    num_bits: int
    config: Mapping[str, Any]
    field: str


def read_format(model_config: Mapping[str, Any]) -> CheckpointFormat | None:
    """The format of the checkpoint's weights; None where they are in full precision.

    Raises:
        ValueError: The format is not supported, or its configuration is not valid; the message is one sentence.
    """
    for field in QUANTIZATION_FIELDS:
        found = model_config.get(field)
        if not found:
            continue
        where = f"config.json: {field}"
        if not isinstance(found, Mapping):
            raise ValueError(f"{where} is no object.")
        found = _common_form(found, where)
        method = _method(found, where)
        return CheckpointFormat(method, _CHECKS[method](found, where), found, field)
    return None


def gguf_activations_of(option: str, quantization: str | None, files: Sequence[Path]) -> str:
    """`rounded` or `exact`: what `auto` is for a model of these GGUF files, unless `int4_dynamic` asks for rounding."""
    if option != "auto":
        return option
    is_small = sum(file.stat().st_size for file in files) < SMALL_FILE_BYTES
    return "exact" if is_small and quantization != "int4_dynamic" else "rounded"


def choose_quantization(
    model_config: Mapping[str, Any], option: str | None, gguf_activations: str = "rounded"
) -> tuple[CheckpointFormat | None, str | None]:
    """The checkpoint's format, or the scheme that weights in full precision are rounded to while they are loaded.

    Both are given for a checkpoint of W8A8 and `int8_dynamic`, which rounds inputs as the checkpoint was made for; for
    one of integers and `int4_dynamic`; and for a GGUF file, unless `gguf_activations` are `exact`.

    Raises:
        ValueError: As `read_format`, or `option` names something else than the checkpoint's format.
    """
    found = read_format(model_config)
    if found is None:
        if option in words_of(CheckpointQuantization) and option != "fp8":
            raise ValueError(
                f"quantization {option} names a format of checkpoints, and config.json has no quantization_config: the "
                "weights are in full precision."
            )
        return None, option
    if option == "int8_dynamic" and _has_rounded_inputs(found):
        return found, option
    if found.method == "gguf" and option in (None, "gguf", "int4_dynamic"):
        if option == "int4_dynamic" and gguf_activations == "exact":
            raise ValueError("quantization int4_dynamic and exact activations of GGUF files exclude each other.")
        return found, None if gguf_activations == "exact" else "int4_dynamic"
    if option == "int4_dynamic" and found.method in _INTEGER_METHODS:
        return found, option
    if option not in (None, found.method):
        raise ValueError(
            f"config.json: {found.field}: the weights are quantized already (by {found.method}), so leave out "
            f"quantization {str(option)[:64]!r}, or name {found.method}."
        )
    return found, None


def _has_rounded_inputs(found: CheckpointFormat) -> bool:
    """Whether weights and inputs are symmetric integers of 8 bits in all groups."""
    groups = found.config.get("config_groups")
    parts = [
        group.get(part)
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for part in ("weights", "input_activations")
    ]
    return bool(parts) and all(
        isinstance(part, Mapping) and part.get("num_bits") == 8 and part.get("type", "int") == "int"
        and part.get("symmetric", True) and part.get("strategy", "channel") in ("channel", "token", "tensor")
        for part in parts
    )  # fmt: skip


def _common_form(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The configuration of a tool that writes a known layout under another name, as that of the layout."""
    if found.get("quant_method") in ("auto-round", "intel/auto-round"):
        return _of_auto_round(found, where)
    return _of_modelopt(found, where) if found.get("quant_method") == "modelopt" else found


def _of_auto_round(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """GPTQ or AWQ; `extra_config` names layers that differ, and those of 16 bits are in full precision."""
    packing = found.get("packing_format") or _AUTO_ROUND_FORMATS[0]
    _require(found, "packing_format", _AUTO_ROUND_FORMATS, where, packing)
    _require(found, "data_type", ("int",), where)
    extra = found.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(rule, Mapping) for rule in extra.values()):
        raise ValueError(f"{where}: extra_config is no object of objects.")
    rules = {
        name: {"bits": found.get("bits"), "group_size": found.get("group_size"), **rule}
        for name, rule in extra.items()
        if str(rule.get("data_type") or "int") == "int" and rule.get("bits") not in (16, 32)
    }
    sizes = {"bits": found.get("bits"), "group_size": found.get("group_size")}
    if packing == "auto_round:auto_gptq":
        return {"quant_method": "gptq", **sizes, "dynamic": {f"+:{name}": rule for name, rule in rules.items()}}
    for rule in rules.values():
        _require(rule, "bits", (4,), f"{where}: extra_config", rule["bits"])
        _require(rule, "group_size", (sizes["group_size"],), f"{where}: extra_config", rule["group_size"])
    return {"quant_method": "awq", **sizes}


def _of_modelopt(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """FP8 with scales of tensors, outputs or blocks; NVFP4 is named by `_method`."""
    algorithm = str(found.get("quant_algo")).upper()
    if algorithm == "FP8_PB_WO":
        return {"weight_block_size": [128, 128], **found}
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN") and "NVFP4" not in algorithm:
        raise ValueError(f"{where}: the algorithm {str(found.get('quant_algo'))[:64]!r} of modelopt is not supported.")
    return found


def _method(found: Mapping[str, Any], where: str) -> str:
    given = str(found.get("quant_method") or ("compressed-tensors" if "config_groups" in found else None))
    words = " ".join(str(found.get(name)) for name in ("quant_method", "quant_algo", "format")).lower()
    if "nvfp4" in words or "modelopt_fp4" in words:
        raise ValueError(f"{where}: NVFP4 is not supported; a checkpoint in FP8, AWQ or GPTQ would run.")
    method = _METHOD_ALIASES.get(given, given)
    if method not in _CHECKS:
        raise ValueError(
            f"{where}: the method {given[:64]!r} is not supported; {', '.join(words_of(CheckpointQuantization))} are."
        )
    return method


def _check_fp8(found: Mapping[str, Any], where: str) -> int:
    _require(found, "fmt", ("e4m3", "float8_e4m3fn"), where)
    _require(found, "activation_scheme", ("static", "dynamic"), where)
    read_block(found, "weight_block_size", where)
    return 8


def read_block(found: Mapping[str, Any], field: str, where: str = "") -> tuple[int, int] | None:
    """Outputs and inputs of a block that has a scale of its own; None where the field is missing.

    Raises:
        ValueError: It is no block.
    """
    given = found.get(field)
    if given is None:
        return None
    sizes = [int(size) for size in given.split("x") if size.isdigit()] if isinstance(given, str) else given
    if not (isinstance(sizes, list) and len(sizes) == 2 and _is_size(sizes[0]) and _is_group_size(sizes[1])):
        raise ValueError(f"{where}: {field} {str(given)[:64]} is not a size and an even size.")
    return sizes[0], sizes[1]


def _check_awq(found: Mapping[str, Any], where: str) -> int:
    _require(found, "bits", (4,), where, _any_of(found, "bits", "w_bit"))
    _require(found, "version", ("gemm",), where, str(found.get("version") or "gemm").lower())
    _require(found, "zero_point", (True,), where)
    _check_group_size(found, where)
    return 4


def _check_gptq(found: Mapping[str, Any], where: str) -> int:
    _require(found, "bits", (4, 8), where, found.get("bits") or 0)
    _require(found, "checkpoint_format", ("gptq", "gptq_v2"), where, found.get("checkpoint_format") or "gptq")
    _check_group_size(found, where)
    return min([int(found["bits"]), *(int(rule["bits"]) for rule in _check_rules(found, where) if rule.get("bits"))])


def gptq_rules(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rules in `dynamic` of a GPTQ configuration for layers that differ; layers that are left out need none."""
    rules = config.get("dynamic") or {}
    return [rule for name, rule in rules.items() if not name.startswith("-:") and rule]


def _check_rules(found: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    rules = found.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, Mapping | None) for rule in rules.values()):
        raise ValueError(f"{where}: dynamic is no object of objects.")
    checked = gptq_rules(found)
    for rule in checked:
        _require(rule, "bits", (4, 8), f"{where}: dynamic")
        _check_group_size(rule, f"{where}: dynamic")
    return checked


def _check_bitsandbytes(found: Mapping[str, Any], where: str) -> int:
    has_four, has_eight = (bool(found.get(name) or found.get(f"_{name}")) for name in ("load_in_4bit", "load_in_8bit"))
    if has_four == has_eight:
        raise ValueError(f"{where}: exactly one of load_in_4bit and load_in_8bit must be true.")
    _require(found, "bnb_4bit_quant_type", ("nf4", "fp4"), where)
    _require(found, "bnb_4bit_quant_storage", ("uint8", "bfloat16", "float16", "float32"), where)
    return 4 if has_four else 8


def _check_mxfp4(found: Mapping[str, Any], where: str) -> int:
    return 4


def _check_gguf(found: Mapping[str, Any], where: str) -> int:
    return 4  # the least of what tensors of a file have; each has a type of its own


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


def _check_compressed_tensors(found: Mapping[str, Any], where: str) -> int:
    for name in ("sparsity_config", "transform_config"):
        given = found.get(name)
        if given and not (isinstance(given, Mapping) and given.get("format") == "dense"):
            raise ValueError(f"{where}: {name} is not supported.")
    _require(found, "quantization_status", ("compressed", "frozen"), where)  # older tools write what was before
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{where}: config_groups is no object of groups.")
    where = f"{where}: config_groups"
    return min(_check_config_group(group, found, f"{where}.{name[:64]}") for name, group in groups.items())


def _check_config_group(group: object, found: Mapping[str, Any], where: str) -> int:
    if not isinstance(group, Mapping):
        raise ValueError(f"{where} is no object.")
    kind = group.get("format") or found.get("format")
    if "nvfp4" in str(kind):
        raise ValueError(f"{where}: NVFP4 is not supported; a checkpoint in FP8, AWQ or GPTQ would run.")
    if kind != "mixed-precision":
        _require(group, "format", _FORMATS, where, kind)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where}: weights is no object.")
    _require(weights, "type", ("int", "float"), f"{where}.weights")
    is_mxfp4 = kind == "mxfp4-pack-quantized"
    bits = (4,) if is_mxfp4 else (8,) if weights.get("type") == "float" else (4, 8)
    _require(weights, "num_bits", bits, f"{where}.weights", weights.get("num_bits") or 0)
    _require(weights, "strategy", _STRATEGIES, f"{where}.weights")
    _check_group_size(weights, f"{where}.weights")
    read_block(weights, "block_structure", f"{where}.weights")
    activations = group.get("input_activations")
    if isinstance(activations, Mapping):
        _require(activations, "num_bits", (8,), f"{where}.input_activations")
    return int(weights["num_bits"])


def _require(found: Mapping[str, Any], name: str, known: tuple[Any, ...], where: str, *given: Any) -> None:
    """Refuses a value that is none of `known`; where it is not `given`, it may be missing."""
    value = given[0] if given else found.get(name)
    if value not in known and (given or value is not None):
        words = ", ".join(str(word) for word in known)
        verb = "is" if len(known) == 1 else "are"
        raise ValueError(f"{where}: {name} {str(value)[:64]!r} is not supported; {words} {verb}.")


def _check_group_size(found: Mapping[str, Any], where: str) -> None:
    size = _any_of(found, "group_size", "q_group_size")
    if size is not None and size != -1 and not _is_group_size(size):
        raise ValueError(f"{where}: group_size {str(size)[:64]} is not supported; -1 and even numbers are.")


def _is_group_size(size: object) -> bool:
    return _is_size(size) and size % 2 == 0  # type: ignore[operator]  # it is an integer


def _is_size(size: object) -> bool:
    return type(size) is int and 0 < size <= _MAX_GROUP_SIZE


def _any_of(found: Mapping[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], int]] = {
    "fp8": _check_fp8,
    "compressed-tensors": _check_compressed_tensors,
    "awq": _check_awq,
    "gptq": _check_gptq,
    "bitsandbytes": _check_bitsandbytes,
    "mxfp4": _check_mxfp4,
    "gguf": _check_gguf,
}
