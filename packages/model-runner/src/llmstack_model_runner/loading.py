"""Loading of a served model: its configuration, its layers and its weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from llmstack_model_files import weights_digest
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
    resolve_dtype,
    scheme_on,
)
from llmstack_types import KVCacheSpec, ModelRunnerConfig

logger = logging.getLogger(__name__)


class ModelReport(NamedTuple):
    """What a runner reports of its model, each as one line of text.

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
    digest = weights_digest(model_path, of_content=config.digest_weight_content)  # before reading
    model_config, checkpoint_format, scheme = read_served_config(config)
    dtype = resolve_dtype(config.dtype, model_config, model_path, config.load_format)
    scheme = scheme_on(device, scheme, config.quantization)
    name = architecture(model_config)
    # Attention layers read it too.
    layers = AdaptedLayers() if config.enable_lora else None
    with (
        packed_linears(scheme, config.enable_deterministic_inference), sharded(sharding), adapted(layers),
        draft_heads(config.draft_head == "mtp"),
    ):  # fmt: skip
        model = make_model(name, config.model_impl, (model_config, dtype, device), sharding)
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
            model, model_path, config.load_format, dtype, config.seed, scheme, device,
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
