"""Gemma 4: two sizes of heads, and late layers that read earlier keys and values.

Layers with a window and layers without have heads of two sizes, and the latter may use their keys as values. The last
layers of small models keep nothing: each reads what the last layer of its kind before them has written. Small models
add vectors of the token to the residual of every layer. Some have experts beside the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers.attention import plan_attention, plan_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, AttentionPlans, LayerStep
from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.rotary import RopeParameters, parse_rope
from llmstack_model_runner.layers.token_inputs import TokenInputs
from llmstack_model_runner.layers.weight_slot import WeightSlot
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.gemma import read_optional_float
from llmstack_model_runner.models.gemma4_layer import Gemma4Layer, Gemma4LayerSettings
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayerSettings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights, read_expert_numbers

# Defaults of fields that a configuration omits.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_UNIFIED: Mapping[str, Any] = {"max_position_embeddings": 262_144, "sliding_window": 1024}
_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_PATTERN = 6
_KINDS = ("sliding_attention", "full_attention")


class Gemma4(StackedExpertWeights):
    """`Gemma4ForCausalLM`, and the text of `Gemma4ForConditionalGeneration`."""

    can_be_sharded: ClassVar[bool] = True
    _layers: list[Gemma4Layer]  # type: ignore[assignment]  # all layers of this model are of its own class

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        settings = [layer for layer in self.read_settings(config).layers if isinstance(layer, Gemma4LayerSettings)]
        self._sources = [layer.source for layer in settings if layer.source is not None]
        self._inputs: TokenInputs | None = None
        if settings[0].input_size:
            num_rows = read_int({**_DEFAULTS, **config}, "vocab_size_per_layer_input")
            norm = settings[0].norm("model.per_layer_projection_norm", settings[0].input_size, dtype, device)
            pad_id = config.get("pad_token_id") or 0
            self._inputs = TokenInputs(
                "model.", num_rows, self._hidden_size, len(settings), norm, pad_id, dtype, device
            )
        if (self._sources or self._inputs) and not (self._sharding.is_first_stage and self._sharding.is_last_stage):
            raise ValueError(
                "this model's layers need the tokens, or keys and values of earlier layers: they cannot be cut into "
                "pipeline stages (use tensor parallelism)"
            )
        for layer, source in zip(self._layers[len(self._layers) - len(self._sources) :], self._sources, strict=True):
            layer.read_scales_of(self._layers[source])

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        complete = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
        refuse(config, "use_bidirectional_attention", None, "vision")
        has_bias = read_bool(complete, "attention_bias", False)
        kinds = _read_kinds(complete)
        sources = _read_sources(complete, kinds)
        window = read_int(complete, "sliding_window")
        settings = read_llama(
            {**complete, "rope_parameters": None, "rope_scaling": None, "layer_types": kinds},
            window,
            activation=str(complete.get("hidden_activation") or "gelu_pytorch_tanh"),
            scale=1.0,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_qk_norm=True,
            has_value_norm=True,
            has_post_norms=True,
            has_float32_norms=True,
        )
        layers: list[LlamaLayerSettings] = [
            _layer(complete, replace(layer, sliding_window=window if kind == _KINDS[0] else None), kind, number, source)
            for number, (layer, kind, source) in enumerate(zip(settings.layers, kinds, sources, strict=True))
        ]
        return replace(
            settings,
            layers=layers,
            embedding_scale=settings.hidden_size**0.5,
            logit_soft_cap=read_optional_float(complete, "final_logit_softcapping"),
        )

    @property
    def vector_size(self) -> int | None:
        """None where every layer needs the tokens themselves."""
        return None if self._inputs is not None else super().vector_size

    @property
    def item_size(self) -> int | None:
        """The size of vectors in place of tokens; for these every layer has the vectors of the padding token."""
        return super().vector_size

    def slots(self) -> dict[str, WeightSlot]:
        return super().slots() | ({} if self._inputs is None else self._inputs.slots())

    def rename(self, name: str) -> str:
        """The names of routers and experts are those of other families within the layer."""
        own = super().rename(name).replace(".router.proj.", ".router.gate.")
        own = own.replace(".router.per_expert_scale", ".router.gate.scales")
        return own.replace(".experts.", ".router.experts.") if ".router.experts." not in own else own

    def is_ignored(self, name: str) -> bool:
        """Projections and norms of keys and values in layers that read those of others, too."""
        first_reader = len(self._layers) - len(self._sources)
        for number in range(first_reader, len(self._layers)):
            if f".layers.{number}.self_attn." in name and name.rsplit(".", 2)[-2] in ("k_proj", "v_proj", "k_norm"):
                return True
        return super().is_ignored(name)

    @property
    def _own_layers(self) -> list[DecoderLayer]:
        return [*self._layers] if self._sources else super()._own_layers

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm, or after this stage's last layer."""
        if not self._sources and self._inputs is None:
            return super().forward(token_ids, positions, metadata, kv_caches)
        planned = self._plan(metadata, kv_caches)
        caches = [*kv_caches, *(kv_caches[source] for source in self._sources)]
        hidden, residual = self._enter(token_ids, metadata.vectors)
        inputs = None if self._inputs is None else self._inputs(token_ids, hidden, metadata.vectors)
        first_reader = len(self._layers) - len(self._sources) if self._sources else -1
        for number, (layer, kv_cache, plan) in enumerate(zip(self._layers, caches, planned, strict=True)):
            ends = metadata.last_layer
            if number == first_reader and ends is not None and residual is not None:
                # From here on nothing is written: only the tokens whose output is of use are computed.
                hidden, residual, positions = (ends.of_queries(part) for part in (hidden, residual, positions))
                inputs = None if inputs is None else ends.of_queries(inputs)
            own_input = None if inputs is None else inputs[:, number]
            hidden, residual = layer.compute(hidden, residual, LayerStep(positions, kv_cache, *plan), own_input)
        return self._norm.add(hidden, residual)[0]

    def _plan(
        self, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> Sequence[tuple[AttentionMetadata, AttentionPlans]]:
        """For each layer its metadata and plans. Layers that read others' keys and values take the last tokens only."""
        windows = self.kv_spec.sliding_windows
        planned = plan_layers(metadata, kv_caches, windows, has_readers=bool(self._sources))
        source_to_plan: dict[int, tuple[AttentionMetadata, AttentionPlans]] = {}
        for source in set(self._sources):
            ends = planned[source][0].last_layer
            if ends is None:
                source_to_plan[source] = planned[source]
            else:
                own = replace(ends, queries=None, vectors=None)  # a last token sees no more of a picture than it had
                plans = plan_attention(own, kv_caches[source][0], windows[source : source + 1])
                source_to_plan[source] = own, plans
        return [*planned, *(source_to_plan[source] for source in self._sources)]


class Gemma4Unified(Gemma4):
    """`Gemma4UnifiedForCausalLM`: the same without vectors of the tokens and without experts."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        given = {name: value for name, value in config.items() if value is not None}
        return super().read_settings({**_UNIFIED, **given, "hidden_size_per_layer_input": 0, "enable_moe_block": False})


def _layer(
    config: Mapping[str, Any], layer: LlamaLayerSettings, kind: str, number: int, source: int | None
) -> Gemma4LayerSettings:
    """The settings of one layer, whose heads have the size of its kind."""
    num_kv_heads, head_dim = _read_heads(config, kind, number)
    fields = {name: getattr(layer, name) for name in LlamaLayerSettings.__dataclass_fields__}
    widening = 2 if source is not None and read_bool(config, "use_double_wide_mlp", False) else 1
    fields |= {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope": _read_rope(config, kind, head_dim),
        "intermediate_size": layer.intermediate_size * widening,
        "are_keys_values": kind == "full_attention" and read_bool(config, "attention_k_eq_v", False),
    }
    return Gemma4LayerSettings(
        **fields,
        source=source,
        input_size=_read_input_size(config),
        own_experts=_read_experts(config) if read_bool(config, "enable_moe_block", False) else None,
    )


def _read_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: by default every sixth has no window, and the last never has one."""
    num_layers = read_int(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [_KINDS[(index + 1) % _PATTERN == 0] for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ValueError(f"config.json: layer_types must name {' or '.join(_KINDS)} for each of {num_layers} layers.")
    return [*kinds[:-1], "full_attention"]


def _read_sources(config: Mapping[str, Any], kinds: Sequence[str]) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads; None for its own."""
    num_readers = read_int(config, "num_kv_shared_layers", 0) if config.get("num_kv_shared_layers") else 0
    first_reader = len(kinds) - num_readers
    kind_to_source = {kind: number for number, kind in enumerate(kinds[: max(first_reader, 0)])}
    if num_readers and not set(kinds) <= set(kind_to_source):
        raise ValueError(
            f"config.json: num_kv_shared_layers is {num_readers}: no layer before has keys and values of each kind."
        )
    return [None if number < first_reader else kind_to_source[kind] for number, kind in enumerate(kinds)]


def _read_heads(config: Mapping[str, Any], kind: str, number: int) -> tuple[int, int]:
    """KV heads and head size of a layer: by its kind as published, or by its number as transformers 5 writes them."""
    own: Any = {}
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        if not isinstance(by_layer, Mapping) or not all(key.isdecimal() for key in by_layer):
            raise ValueError("config.json: per_layer_config must be an object by numbers of layers.")
        own = {int(key): values for key, values in by_layer.items()}.get(number, {})  # written as 05 or as 5
    elif kind == "full_attention":
        own = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("num_global_key_value_heads") and read_bool(config, "attention_k_eq_v", False):
            own = {**own, "num_key_value_heads": config["num_global_key_value_heads"]}
    if not isinstance(own, Mapping) or set(own) - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"config.json: per_layer_config of layer {number} must have head_dim or num_key_value_heads.")
    merged = {**config, **own}
    num_heads, num_kv_heads = read_int(config, "num_attention_heads"), read_int(merged, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads.")
    return num_kv_heads, read_int(merged, "head_dim")


def _read_rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeParameters:
    found = config.get("rope_parameters")
    own = found.get(kind) if isinstance(found, Mapping) else None
    parameters = own if isinstance(own, Mapping) else _ROPES[kind]
    return parse_rope({"rope_parameters": parameters}, head_dim, read_int(config, "max_position_embeddings"))


def _read_input_size(config: Mapping[str, Any]) -> int:
    """Width of the tokens' vectors in every layer; 0 for none."""
    if not config.get("hidden_size_per_layer_input"):
        return 0
    vocab_size, num_rows = read_int(config, "vocab_size"), read_int(config, "vocab_size_per_layer_input")
    if num_rows < vocab_size:
        raise ValueError(
            f"config.json: vocab_size_per_layer_input is {num_rows}, which is less than the {vocab_size} of vocab_size."
        )
    return read_int(config, "hidden_size_per_layer_input")


def _read_experts(config: Mapping[str, Any]) -> ExpertSettings:
    numbers = {**config, "num_experts_per_tok": read_int(config, "top_k_experts")}
    return ExpertSettings(
        *read_expert_numbers(numbers, read_int(config, "num_experts"), 1),
        inner_size=read_int(config, "moe_intermediate_size"),
        is_normalised=True,
        name="router",
        has_scales=True,
    )
