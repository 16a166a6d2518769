"""Checks of a model before torch is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from llmstack_gguf import CLASS_NAMES as GGUF_CLASS_NAMES
from llmstack_model_files import (
    ModelFilesError,
    TensorInfo,
    check_safetensors,
    gguf_weights,
    has_own_names,
    read_model_config,
    safetensors_files,
)
from llmstack_model_runner.architectures import ARCHITECTURES, DRAFT_HEADS, POOLING_DECODERS, supported_architectures
from llmstack_model_runner.checkpoint_formats.config import QUANTIZATION_FIELDS, choose_quantization
from llmstack_model_runner.declared_sizes import (
    MAX_DUMMY_LAYERS,
    first_int,
    least_parameters,
    rope_problems,
    size_problems,
    text_fields,
)
from llmstack_model_runner.device.host_limits import available_memory_bytes, memory_limit_bytes
from llmstack_model_runner.unsupported_kinds import unsupported_kind
from llmstack_types import ModelRunnerConfig
from llmstack_types.vocabulary import DTYPE_ALIASES, KV_CACHE_DTYPE_ALIASES, CheckpointQuantization, words_of

_INSTALL = "pip install 'llmstack-model-runner[transformers]'"
_WHAT_RUNS = "decoders of text run, such as LlamaForCausalLM and Qwen3ForCausalLM (docs/models.md lists them)"
_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
_SMALL_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"})
# So many layers are built in no time, and then miss their weights.
_MAX_UNCHECKED_LAYERS = 256
_SCHEME_TO_BITS: Mapping[str | None, int] = {"int8": 8, "fp8": 8, "int4": 4, "int8_dynamic": 8,
                                                   "int4_dynamic": 4}  # fmt: skip
_DTYPE_TO_BITS: Mapping[str, int] = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8}
_LEAST_KV_BITS = 16
_LEAST_WEIGHT_BITS = 16
_LEAST_STORED_BITS = 2  # of the types of GGUF files
_GIB = 1 << 30
_ENDS = ("embedding", "head")
# What a process takes besides weights and KV cache, and the share of the weights that packing takes for a moment.
PROCESS_BYTES: Final = 192 << 20
PACKING_SHARE: Final = 4


def find_problems(
    config: ModelRunnerConfig,
    *,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    is_max_model_len_explicit: bool = False,
    root: Path = Path("/"),
) -> list[str]:
    """Reasons why the model cannot run on this machine, a sentence each; empty if none is known.

    `num_blocks`, `kv_cache_bytes`: The size of the KV cache, where it is given.
    `is_max_model_len_explicit`: Whether one request of `max_model_len` must fit; else one block must.
    `root`: Where `proc`, `sys` and `dev` are found.
    """
    folder = Path(config.model_path)
    try:
        model_config = read_model_config(folder, json.loads(config.hf_overrides or "{}"))
    except ModelFilesError as error:
        return [str(error)]
    problems = [*_architecture_problems(model_config, config.model_impl), *_rank_problems(config, model_config, root)]
    if _has_own_code(model_config, config):
        problems += [*size_problems(model_config), *rope_problems(model_config)]
    problems += _quantization_problems(model_config, config)
    weight_bytes = _declared_weight_bytes(model_config, config)
    if config.load_format == "dummy":
        problems += _dummy_problems(model_config)
    else:
        problems += _load_format_problems(folder, config.load_format)
        try:
            tensors = _read_tensors(folder)
            weight_bytes = max(weight_bytes, _least_weight_bytes(folder, tensors, config))
            problems += _tensor_problems(model_config, tensors)
        except ModelFilesError as error:
            problems.append(str(error))
    num_tokens = config.max_model_len if is_max_model_len_explicit else config.block_size
    token_bytes = _least_token_bytes(model_config, config.kv_cache_dtype)
    if model_config.get("sliding_window") or model_config.get("layer_types"):
        num_tokens, num_blocks = min(num_tokens, config.block_size), 1  # layers may hold less than the whole request
    kv_bytes = kv_cache_bytes or (num_blocks or 0) * config.block_size * token_bytes or num_tokens * token_bytes
    if config.draft_head == "mtp" and str(model_config.get("architectures", [""])[0]) not in DRAFT_HEADS:
        problems.append(f"speculative_config: the method 'mtp' is built for {', '.join(sorted(DRAFT_HEADS))} alone.")
    if config.draft_model_path and config.draft_head:
        problems += [f"draft head {config.draft_model_path}: {problem}" for problem in _draft_head_problems(config)]
    elif config.draft_model_path:
        own = config.of_draft_model()
        problems += [f"draft model {own.model_path}: {problem}" for problem in find_problems(own, root=root)]
    return [*problems, *_memory_problems(weight_bytes, kv_bytes, config, root)]


def _draft_head_problems(config: ModelRunnerConfig) -> Iterator[str]:
    """Reasons why files are no draft head; the rest is known once both configurations are read into layers."""
    folder = Path(config.draft_model_path)
    try:
        read_model_config(folder, {})
        if config.load_format != "dummy":
            _read_tensors(folder)
    except ModelFilesError as error:
        yield str(error)
    if gguf_weights(folder):
        yield "it is a GGUF file, and draft heads are read from safetensors files."


def _load_format_problems(folder: Path, load_format: str) -> list[str]:
    """A sentence where the files are of another format than the one that was asked for."""
    found = "gguf" if gguf_weights(folder) else "mistral" if has_own_names(folder) else "safetensors"
    if load_format in ("auto", found) or (found == "mistral" and load_format == "safetensors"):
        return []
    return [f"--load-format {load_format}: the weights of this model are in {found} files."]


def find_room_problem(
    config: ModelRunnerConfig,
    *,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    root: Path = Path("/"),
) -> str:
    """Why further engine cores, as many as there are, do not fit into the memory that is free; empty where they may.

    Raises:
        ModelFilesError: Files of the model cannot be read.
    """
    room = available_memory_bytes(root)
    if room is None:
        return ""
    process_bytes, weight_bytes, token_bytes = least_memory(config)
    kv_bytes = kv_cache_bytes or (num_blocks or 0) * config.block_size * token_bytes or config.block_size * token_bytes
    needed = process_bytes + weight_bytes + config.num_engines * kv_bytes
    if needed <= room:
        return ""
    beside = "a second engine core needs" if config.num_engines == 1 else f"{config.num_engines} more engine cores need"
    return f"{beside} about {needed / _GIB:.1f} GiB, and {room / _GIB:.1f} GiB are free"


def least_memory(config: ModelRunnerConfig) -> tuple[int, int, int]:
    """Lower bounds in bytes: of all processes here, of their weights as they are loaded, of a token's keys and values.

    Raises:
        ModelFilesError: Files of the model cannot be read.
    """
    folder = Path(config.model_path)
    model_config = read_model_config(folder, json.loads(config.hf_overrides or "{}"))
    if config.load_format == "dummy":
        weight_bytes = _declared_weight_bytes(model_config, config)
    else:
        weight_bytes = _least_weight_bytes(folder, _read_tensors(folder), config)
    process_bytes = config.num_engines * config.num_local_ranks * PROCESS_BYTES
    loaded_bytes = config.num_engines * (weight_bytes + weight_bytes // PACKING_SHARE)
    return process_bytes, loaded_bytes, _least_token_bytes(model_config, config.kv_cache_dtype)


def readable_formats(architecture: str) -> tuple[str, ...]:
    """Formats of quantized checkpoints that can be read for an architecture, whichever code runs it."""
    has_gguf = architecture in GGUF_CLASS_NAMES
    return tuple(word for word in words_of(CheckpointQuantization) if word != "gguf" or has_gguf)


def adapted_layers_of(architecture: str) -> tuple[str, ...]:
    """Layers that LoRA adapters can change where llmstack's own code runs a generating model."""
    target = ARCHITECTURES.get(architecture)
    if target is None:
        return ()
    has_experts = target.partition(":")[0].endswith(
        (".deepseek", ".ernie_moe", ".glm4_moe", ".mixture_of_experts", ".gpt_oss", ".sparse_deepseek")
    )
    return ("attention", "experts" if has_experts else "feed-forward", *_ENDS)


def _quantization_problems(model_config: Mapping[str, Any], config: ModelRunnerConfig) -> Iterator[str]:
    try:
        found, _ = choose_quantization(model_config, config.quantization, config.gguf_activations)
    except ValueError as error:
        yield str(error)
        return
    architectures = model_config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if found is not None and found.method not in readable_formats(str(name)):
        yield f"config.json: {found.field}: {found.method} files of {str(name)[:64]} cannot be read."


def _architecture_problems(model_config: Mapping[str, Any], model_impl: str) -> Iterator[str]:
    architectures = model_config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    transformers = find_spec("transformers")
    kind = unsupported_kind(model_config) if isinstance(name, str) and name not in supported_architectures() else None
    if not isinstance(name, str):
        yield "config.json names no architecture: the list `architectures` is missing or empty."
    elif kind is not None:
        yield f"config.json: {name[:64]} is {kind}, which is not supported; {_WHAT_RUNS}."
    elif model_impl == "transformers":
        if transformers is None:
            yield f"model_impl transformers needs the package transformers: {_INSTALL}."
    elif name not in supported_architectures():
        unsupported = f"config.json: the architecture {name[:64]!r} is not supported"
        if model_impl == "llmstack":
            yield f"{unsupported} by model_impl llmstack; use another model, or model_impl auto."
        elif transformers is None:
            yield f"{unsupported}, and the package transformers is not installed, which may support it: {_INSTALL}."
        elif not _may_be_known_to_transformers(name, transformers.origin):
            yield f"{unsupported}, nor is it by transformers; docs/models.md lists those that are."


def _rank_problems(config: ModelRunnerConfig, model_config: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Reasons why the ranks cannot share the model out."""
    tp_size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if config.num_ranks == 1:
        return
    architecture = next(iter(model_config.get("architectures") or []), "")
    can_be_split = architecture in ARCHITECTURES or (architecture in POOLING_DECODERS and num_stages == 1)
    if config.model_impl == "transformers" or (architecture in supported_architectures() and not can_be_split):
        yield (
            f"tensor_parallel_size {tp_size} and pipeline_parallel_size {num_stages}: {architecture[:64]} with "
            f"model_impl {config.model_impl} cannot be split over ranks; docs/parallel.md lists what can."
        )
    text = text_fields(model_config)
    num_heads = first_int(text, "num_attention_heads", "n_head")
    if num_heads % tp_size:
        yield f"tensor_parallel_size is {tp_size}, and the model's {num_heads} attention heads are no multiple of it."
    num_kv_heads = first_int(text, "num_key_value_heads")
    if num_kv_heads and num_kv_heads % tp_size and tp_size % num_kv_heads:
        yield (
            f"tensor_parallel_size is {tp_size}, which neither divides the model's {num_kv_heads} key-value heads nor "
            "is a multiple of them."
        )
    num_layers = first_int(text, "num_hidden_layers", "n_layer")
    if 0 < num_layers < num_stages:
        yield f"pipeline_parallel_size is {num_stages}, but the model has only {num_layers} layers to split."
    num_experts = first_int(text, "num_local_experts", "num_experts", "n_routed_experts")
    if config.enable_expert_parallel and num_experts < tp_size:
        count = f"{num_experts or 'no'} experts, which"
        yield f"enable_expert_parallel: the model has {count} cannot be spread over tensor_parallel_size {tp_size}."
    num_gpus = len(list((root / "dev").glob("nvidia[0-9]*")))
    if (config.device == "cuda" or (config.device == "auto" and num_gpus)) and num_gpus < config.num_local_ranks:
        num_ranks = config.num_local_ranks
        yield f"{num_ranks} ranks need a GPU each, and the machine has {num_gpus}; use --device cpu or fewer."


def _may_be_known_to_transformers(name: str, origin: str | None) -> bool:
    """Whether the table of transformers names the architecture; its text is searched, since importing takes torch."""
    if origin is None:
        return True
    try:
        table = (Path(origin).parent / "models/auto/modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return True  # another layout, which the runner knows better
    return f'"{name}"' in table


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of all safetensors files by name; none of GGUF files, whose conversion has checked them."""
    if gguf_weights(folder):
        return {}
    return {name: info for path in safetensors_files(folder) for name, info in check_safetensors(path).items()}


def _tensor_problems(model_config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Reasons why the tensors cannot be those of the configuration."""
    small = next((name for name, info in tensors.items() if info.dtype in _SMALL_FLOATS), None)
    if small is not None and not any(model_config.get(field) for field in QUANTIZATION_FIELDS):
        yield (
            f"{small[:128]} is stored as {tensors[small].dtype}, and config.json has no quantization_config that says "
            "what its numbers mean."
        )
    num_layers = first_int(text_fields(model_config), "num_hidden_layers", "n_layer")
    if tensors and num_layers > max(len(tensors), _MAX_UNCHECKED_LAYERS):
        yield f"config.json: the model has {num_layers} layers, and the weights have only {len(tensors)} tensors."


def _dummy_problems(model_config: Mapping[str, Any]) -> Iterator[str]:
    num_layers = first_int(text_fields(model_config), "num_hidden_layers", "n_layer")
    if num_layers > MAX_DUMMY_LAYERS:
        yield f"config.json: the model has {num_layers} layers; at most {MAX_DUMMY_LAYERS} can have dummy weights."


def _declared_weight_bytes(model_config: Mapping[str, Any], config: ModelRunnerConfig) -> int:
    """A lower bound of the weights of this machine's ranks, from the configuration alone."""
    if not _has_own_code(model_config, config):
        return 0  # what its sizes mean is unknown
    is_stored_small = any(model_config.get(field) for field in QUANTIZATION_FIELDS)
    if config.load_format != "dummy" and (is_stored_small or gguf_weights(Path(config.model_path))):
        bits = _LEAST_STORED_BITS
    elif config.quantization is not None:
        bits = _SCHEME_TO_BITS.get(config.quantization, _LEAST_STORED_BITS)
    else:
        bits = _DTYPE_TO_BITS.get(DTYPE_ALIASES.get(config.dtype, config.dtype), _LEAST_WEIGHT_BITS)
    return least_parameters(model_config) * bits // 8 * config.num_local_ranks // config.num_ranks


def _has_own_code(model_config: Mapping[str, Any], config: ModelRunnerConfig) -> bool:
    architectures = model_config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    return config.model_impl != "transformers" and (name in ARCHITECTURES or name in POOLING_DECODERS)


def _least_weight_bytes(folder: Path, tensors: Mapping[str, TensorInfo], config: ModelRunnerConfig) -> int:
    """A lower bound of the weights in memory."""
    files = gguf_weights(folder)
    if files:
        return sum(file.stat().st_size for file in files)  # weights keep their bits
    return sum(_least_bytes(info, config) for info in tensors.values())


def _least_bytes(info: TensorInfo, config: ModelRunnerConfig) -> int:
    stored = info.end - info.start
    if info.dtype not in _FLOATS:
        return stored  # of a quantized checkpoint, whose weights keep their bytes
    if config.quantization is not None and len(info.shape) > 1:
        return min(stored, math.prod(info.shape) * _SCHEME_TO_BITS.get(config.quantization, 4) // 8)
    bits = _DTYPE_TO_BITS.get(DTYPE_ALIASES.get(config.dtype, config.dtype))
    return stored if bits is None else math.prod(info.shape) * bits // 8


def _least_token_bytes(model_config: Mapping[str, Any], kv_cache_dtype: str) -> int:
    """A lower bound of the keys and values of a token in all layers; 0 where the configuration does not say."""
    text = text_fields(model_config)
    num_layers = first_int(text, "num_hidden_layers", "n_layer")
    num_heads = first_int(text, "num_attention_heads", "n_head")
    hidden_size = first_int(text, "hidden_size", "n_embd")
    if not (num_layers and num_heads and hidden_size):
        return 0
    is_multi_query = bool(text.get("multi_query"))
    num_kv_heads = first_int(text, "num_key_value_heads", "num_kv_heads") or (1 if is_multi_query else num_heads)
    head_dim = first_int(text, "head_dim") or hidden_size // num_heads
    bits = _DTYPE_TO_BITS.get(KV_CACHE_DTYPE_ALIASES.get(kv_cache_dtype, kv_cache_dtype), _LEAST_KV_BITS)
    latent = first_int(text, "kv_lora_rank")
    numbers = latent or 2 * min(num_kv_heads, num_heads) * head_dim
    return num_layers * numbers * bits // 8


def _memory_problems(weight_bytes: int, kv_bytes: int, config: ModelRunnerConfig, root: Path) -> Iterator[str]:
    """Lack of memory on a CPU; that of a GPU is unknown without torch."""
    has_gpu = any((root / "dev").glob("nvidia[0-9]*"))
    limit = memory_limit_bytes(root)
    if config.device == "cuda" or (config.device == "auto" and has_gpu) or limit is None:
        return
    if weight_bytes + kv_bytes <= limit:
        num_engines = config.num_engines
        needed = num_engines * (config.num_local_ranks * PROCESS_BYTES + weight_bytes + kv_bytes)
        if num_engines > 1 and needed > limit:
            yield (
                f"{num_engines} engine cores need at least {_shown_size(needed)}, and the memory limit is "
                f"{_shown_size(limit)}; use a smaller --data-parallel-size."
            )
        return
    weights, kv, memory = map(_shown_size, (weight_bytes, kv_bytes, limit))
    yield (
        f"the model needs at least {weights} for weights and {kv} for the KV cache, and the memory limit is {memory}; "
        "use a smaller model, --quantization int8, a smaller --max-model-len or a smaller KV cache "
        "(--kv-cache-memory-bytes, --num-kv-blocks)."
    )


def _shown_size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
