"""Loading of a served model: its configuration, its layers and its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from llmstack_model_files import artifact_path, gguf_weights, read_json, weights_digest
from llmstack_model_runner.adapters.store import AdapterStore, make_store
from llmstack_model_runner.device.errors import allocation
from llmstack_model_runner.device.start_checks import architecture, check_max_model_len, set_up_cpu
from llmstack_model_runner.layers.adaptation import AdaptedLayers, adapted
from llmstack_model_runner.layers.draft_heads import draft_heads
from llmstack_model_runner.layers.packing import packed_linears
from llmstack_model_runner.layers.sharding import Sharding, sharded
from llmstack_model_runner.memory.kv_cache_dtype import check_capability, dtype_name, resolve_kv_cache_dtype
from llmstack_model_runner.memory.kv_cache_groups import describe_groups, group_stage_layers, join_groups
from llmstack_model_runner.memory.kv_cache_spec import make_kv_cache_spec
from llmstack_model_runner.memory.sizing import settle_heap
from llmstack_model_runner.models import Model
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.models.heads import Heads, find_heads
from llmstack_model_runner.models.numeric_contract import check_deterministic, describe_numeric_contract, for_ranks
from llmstack_model_runner.weights import (
    describe_quantization,
    kept_weights,
    load_weights,
    num_weight_bytes,
    read_served_config,
    read_without_keeping,
    resolve_dtype,
    scheme_on,
)
from llmstack_types import KVCacheSpec, ModelRunnerConfig

logger = logging.getLogger(__name__)

# What a trainer's library writes into its configuration of the same model.
_NOT_OF_THE_MODEL: Final = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})


class ModelReport(NamedTuple):
    """The report of a runner on its model, each part as one line of text.

    Attributes:
        weights_digest: Of the files of the weights.
        numeric_contract: Whether logits are bit-equal in any batch.
        quantization: How quantized linear layers are computed; empty without any.
        kv_cache: What layers free; empty for nothing.
    """

    weights_digest: str = ""
    numeric_contract: str = ""
    quantization: str = ""
    kv_cache: str = ""

    def entries(self, model: Model | None) -> dict[str, str]:
        """The entries of `ModelRunner.backends` for a model; None where its weights are freed."""
        entries = {}
        if model is not None:
            entries = {"model": model.implementation, "numeric_contract": self.numeric_contract}
            entries["weights"] = self.weights_digest
        if self.quantization:
            entries["quantization"] = self.quantization
        if self.kv_cache:
            entries["kv_cache"] = self.kv_cache
        return entries


class LoadedModel(NamedTuple):
    """A model with its weights on its device.

    Attributes:
        heads: What it has behind its hidden states.
        spec: Shape of the KV storage, and abilities of the model.
        adapters: The store of its adapters; None where they are not enabled.
        weight_bytes: That a step reads.
    """

    model: Model
    heads: Heads
    spec: KVCacheSpec
    adapters: AdapterStore | None
    report: ModelReport
    weight_bytes: int


def load_served_model(config: ModelRunnerConfig, device: torch.device, sharding: Sharding) -> LoadedModel:
    """Reads the weights of a model, or generates dummy weights.

    Raises:
        ModelFilesError: A file of the model is missing or damaged.
        ValueError: The model is not supported; the message is one sentence.
        EngineStartError: The device cannot hold the weights.
    """
    model_path = Path(config.model_path)
    weights_folder = Path(config.weights_folder)
    # Before reading. Of weights in place of others the content counts: their files come and go.
    digest = weights_digest(weights_folder, of_content=config.digest_weight_content or bool(config.weights_path))
    model_config, checkpoint_format, scheme = read_served_config(config)
    dtype = resolve_dtype(config.dtype, model_config, model_path, config.load_format)
    scheme = scheme_on(device, scheme, config.quantization)
    name = architecture(model_config)
    layers = AdaptedLayers() if config.enable_lora else None
    model = _empty_model(config, name, (model_config, dtype, device), scheme, sharding, layers)
    logger.info("model: %s (%s)", name, model.implementation)
    check_max_model_len(config.max_model_len, model.kv_spec.max_model_len)
    model.limit_context(config.max_model_len)
    heads = find_heads(model, model_config, model_path, device, is_dummy=config.load_format == "dummy")
    weight_bytes = num_weight_bytes(model, dtype, scheme, checkpoint_format)
    if device.type == "cpu":
        is_quantized = scheme is not None or checkpoint_format is not None
        set_up_cpu(weight_bytes, config.num_processes, is_quantized=is_quantized)
    quantization = describe_quantization(scheme, dtype, device, checkpoint_format)
    if quantization:
        logger.info("quantization: %s", quantization)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype)
    if device.type == "cuda":
        check_capability(kv_dtype, torch.cuda.get_device_capability(device))
    is_deterministic = config.enable_deterministic_inference
    contract = describe_numeric_contract(model, dtype, device, kv_dtype, is_deterministic)
    logger.info("numeric contract: %s", for_ranks(contract, sharding))
    if is_deterministic:
        check_deterministic(contract)
    with (
        allocation("the weights do not fit on the device", "use --quantization int8, or a smaller model"),
        kept_weights(config, model_config, dtype, device, sharding) as packed,
    ):
        load_weights(
            model, weights_folder, config.load_format, dtype, config.seed, scheme, device,
            is_batch_invariant=is_deterministic, checkpoint_format=checkpoint_format, packed=packed,
        )  # fmt: skip
    settle_heap(device, weight_bytes)
    groups = group_stage_layers(model.kv_spec, config.max_model_len, config.block_size, dtype_name(kv_dtype))
    report = ModelReport(
        digest, for_ranks(contract, sharding), quantization,
        describe_groups(groups, is_enabled=config.enable_hybrid_kv_cache),
    )  # fmt: skip
    groups = groups if config.enable_hybrid_kv_cache else join_groups(groups)
    shape = (model, model_config, dtype, config.block_size, device, kv_dtype, groups)
    spec = make_kv_cache_spec(*shape, config.enable_prompt_embeds or config.enable_mm_embeds, weight_bytes)
    spec = replace(spec, embedding_size=heads.vector_size or spec.embedding_size)
    return LoadedModel(model, heads, spec, make_store(model, layers, config, dtype, device), report, weight_bytes)


def check_weights(config: ModelRunnerConfig, path: str, device: torch.device, sharding: Sharding) -> ModelRunnerConfig:
    """The configuration of the same model with the weights of another folder, after reading each of them once.

    Of several ranks each reads its part. Nothing is kept of them. One tensor at a time is in memory.

    Raises:
        ModelFilesError: A file is missing or damaged.
        ValueError: They cannot take the place of the present ones: names, shapes, numbers, or another configuration.
    """
    changed = config.with_weights(path)
    model_config, checkpoint_format, scheme = read_served_config(changed)
    if checkpoint_format is not None or gguf_weights(Path(config.model_path)):
        raise ValueError("The model's checkpoint is quantized: only weights in full precision are changed in place.")
    _check_config(Path(config.model_path), Path(path))
    dtype = resolve_dtype(config.dtype, model_config, Path(config.model_path), changed.load_format)
    layers = AdaptedLayers() if config.enable_lora else None
    parts = (model_config, dtype, device)
    scheme = scheme_on(device, scheme, config.quantization)
    model = _empty_model(config, architecture(model_config), parts, scheme, sharding, layers)
    if not model.loads_by_slots:
        raise ValueError(
            "This model's class reads all weights before it fills a layer, so they are not changed in place."
        )
    read_without_keeping(model, path)
    return changed


def _check_config(served: Path, given: Path) -> None:
    """Raises ValueError if the folder has a `config.json` that says something else than the model's."""
    if artifact_path(given, "config.json") is None:
        return
    ours, theirs = (read_json(folder, "config.json") for folder in (served, given))
    for name in sorted({*ours, *theirs} - _NOT_OF_THE_MODEL):
        if ours.get(name) != theirs.get(name):
            raise ValueError(f"config.json beside the weights has another {name[:64]!r} than the model that is served.")


def _empty_model(
    config: ModelRunnerConfig,
    name: str,
    parts: tuple[Mapping[str, Any], torch.dtype, torch.device],
    scheme: str | None,
    sharding: Sharding,
    layers: AdaptedLayers | None,
) -> Model:
    """A model without weights. Attention layers read the context too."""
    with (
        packed_linears(scheme, config.enable_deterministic_inference), sharded(sharding), adapted(layers),
        draft_heads(config.draft_head == "mtp"),
    ):  # fmt: skip
        return make_model(name, config.model_impl, parts, sharding)
