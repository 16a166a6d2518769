"""DeepSeek V3.2, GLM-5: an indexer selects the tokens that are attended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers.key_indexer import IndexerSettings, Selection
from llmstack_model_runner.models.config_values import read_int, refuse
from llmstack_model_runner.models.deepseek import DeepseekLayerSettings, DeepseekV3, read_mixed
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights


class DeepseekV32(StackedExpertWeights, DeepseekV3):
    """`DeepseekV32ForCausalLM`: every layer has an indexer."""

    has_interleaved_indexer: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"n_group": 8, "topk_group": 4, "index_n_heads": 64}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        indexers = [_indexer_of(layer) for layer in self.read_settings(config).layers]
        self.kv_spec = replace(self.kv_spec, num_selected=indexers[0].num_selected)
        first = self.kv_spec.first_layer
        if indexers[first].is_shared:
            raise ValueError(
                f"pipeline_parallel_size: a stage would begin with layer {first}, which attends to what a layer of the "
                "stage before selects; choose another number of stages."
            )

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "scoring_func", "sigmoid")
        refuse(config, "topk_method", "noaux_tc")
        refuse(config, "rope_interleave", True)
        refuse(config, "indexer_rope_interleave", cls.has_interleaved_indexer)
        given = {name: value for name, value in config.items() if value is not None}
        fields = {"routed_scaling_factor": 2.5, **cls.defaults, **given}
        indexer = IndexerSettings(
            num_heads=read_int(fields, "index_n_heads"),
            head_dim=read_int(fields, "index_head_dim", 128),
            num_selected=read_int(fields, "index_topk", 2048),
            is_interleaved=cls.has_interleaved_indexer,
            selection=Selection(),
        )
        rotary_dim = read_int(fields, "qk_rope_head_dim", 64)
        if indexer.head_dim < rotary_dim:
            raise ValueError(
                f"config.json: index_head_dim {indexer.head_dim} is less than qk_rope_head_dim {rotary_dim}."
            )
        settings = read_mixed({**fields, "index_topk": None}, num_dense=3)
        are_shared = cls.read_shared(fields, len(settings.layers))
        pairs = zip(settings.layers, are_shared, strict=True)
        return replace(settings, layers=[_with_indexer(layer, indexer, is_shared) for layer, is_shared in pairs])

    @classmethod
    def read_shared(cls, config: Mapping[str, Any], num_layers: int) -> list[bool]:
        """Which layers attend to what the layer before does."""
        return [False] * num_layers


class GlmMoeDsa(DeepseekV32):
    """`GlmMoeDsaForCausalLM`: some layers may attend to what the one before does (arXiv 2603.12201)."""

    has_interleaved_indexer: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {"n_group": 1, "topk_group": 1, "index_n_heads": 32, "rms_norm_eps": 1e-5}

    @classmethod
    def read_shared(cls, config: Mapping[str, Any], num_layers: int) -> list[bool]:
        kinds = config.get("indexer_types", config.get("index_topk_pattern"))
        if isinstance(kinds, str):
            kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in kinds]
        if kinds is None:
            every = max(read_int(config, "index_topk_freq", 1, least=0), 1)
            offset = read_int(config, "index_skip_topk_offset", 2, least=0)
            kinds = ["shared" if max(number - offset + 1, 0) % every else "full" for number in range(num_layers)]
        is_list = isinstance(kinds, list) and len(kinds) == num_layers
        if not is_list or not {*map(str, kinds)} <= {"full", "shared"} or kinds[0] != "full":
            raise ValueError("config.json: indexer_types must name each layer full or shared, the first one full.")
        return [kind == "shared" for kind in kinds]


def _with_indexer(layer: LlamaLayerSettings, indexer: IndexerSettings, is_shared: bool) -> DeepseekLayerSettings:
    if not isinstance(layer, DeepseekLayerSettings):
        raise TypeError("the layer has no latent attention")
    return replace(layer, latent=replace(layer.latent, indexer=replace(indexer, is_shared=is_shared)))


def _indexer_of(layer: LlamaLayerSettings) -> IndexerSettings:
    if not isinstance(layer, DeepseekLayerSettings) or layer.latent.indexer is None:
        raise TypeError("the layer has no indexer")
    return layer.latent.indexer
