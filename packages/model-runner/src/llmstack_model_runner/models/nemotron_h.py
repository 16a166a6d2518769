"""Nemotron-H and Nemotron 3: blocks of state spaces, attention and experts.

A block with a state or with keys and values, and the feed-forwards behind it, are one layer for the KV storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmstack_model_runner.layers import Linear, RMSNorm, RotaryEmbedding, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.draft_heads import needs_draft_head
from llmstack_model_runner.layers.experts import Experts, ExpertSettings
from llmstack_model_runner.layers.feed_forward import PlainFeedForward
from llmstack_model_runner.layers.mixer import Mixer, MixerSettings
from llmstack_model_runner.layers.state_space import StateSpaceSettings
from llmstack_model_runner.models.bamba import check_state_space, read_step_limits
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.deepseek import read_routing
from llmstack_model_runner.models.draft_head import HeadNames
from llmstack_model_runner.models.kv_spec import LayerKVSpec, keys_and_values
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayerSettings, SelfAttention
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights
from llmstack_model_runner.models.state_layer import HybridModel, mix_layer

_KINDS_OF_PATTERN: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER_KINDS: Mapping[str, str] = {"mamba": "linear_attention", "attention": "full_attention"}
_DRAFT_LAYERS = "mtp.layers."
_NAMES: Mapping[str, str] = {
    "embedding.weight": "embed_tokens.weight",
    "embeddings.weight": "embed_tokens.weight",
    "norm_f.weight": "norm.weight",
}


@dataclass(frozen=True, slots=True)
class NemotronExpertSettings:
    """Sizes of a block of experts.

    Attributes:
        shared_size: Inner size of the expert that computes every token.
        latent_size: Width of what the other experts compute; 0 for that of hidden states.
    """

    experts: ExpertSettings
    shared_size: int
    latent_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronLayerSettings(LlamaLayerSettings):
    """Sizes of some blocks.

    Attributes:
        first_block: Number of the first one, which has a state or attention.
        state: Its state space; None for attention.
        have_experts: Of each further block, whether it has experts in place of a feed-forward.
        block_experts: Sizes of these; None where no block has any.
    """

    first_block: int
    state: MixerSettings | None
    have_experts: tuple[bool, ...]
    block_experts: NemotronExpertSettings | None

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """The memory of the first block."""
        if self.state is None:
            return keys_and_values(self.num_kv_heads, self.head_dim)
        return LayerKVSpec(kind="state", states=self.state.states(dtype))

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """The part of the first block."""
        if self.state is None:
            return SelfAttention(f"{prefix}mixer.", self, rotary, dtype, device)
        return self.state.make(prefix, self.hidden_size, self.eps, dtype, device)

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The blocks without weights."""
        return NemotronLayer("model.layers.", self, dtype, device)

    def make_draft_layer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """A block of attention, and one of experts that replace its feed-forward."""
        own = replace(self, first_block=0, state=None, have_experts=(True,))
        return NemotronLayer(prefix, own, dtype, device)


class NemotronExperts:
    """Experts without gates, which may compute a narrower vector, and one that computes every token."""

    def __init__(
        self,
        prefix: str,
        settings: NemotronLayerSettings,
        own: NemotronExpertSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, activation = settings.hidden_size, settings.activation
        has_bias, latent = settings.has_mlp_bias, own.latent_size
        self._experts = Experts(prefix, latent or size, activation, own.experts, dtype, device)
        name = f"{prefix}mixer.shared_experts"
        self._shared = PlainFeedForward(
            name, size, own.shared_size, activation, has_bias=has_bias, dtype=dtype, device=device
        )
        self._latents: list[Linear] = []  # every rank computes all of both
        if latent:
            names = {f"{prefix}mixer.fc1_latent_proj": latent}, {f"{prefix}mixer.fc2_latent_proj": size}
            self._latents = [
                Linear(inputs, part, has_bias=has_bias, dtype=dtype, device=device)
                for inputs, part in zip((size, latent), names, strict=True)
            ]

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of all parts."""
        return collect_slots([self._experts, self._shared, *self._latents])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size]."""
        if not self._latents:
            return self._experts(x) + self._shared(x)
        narrow, widen = self._latents
        return widen(self._experts(narrow(x), x)) + self._shared(x)


class NemotronLayer:
    """Blocks of which the first has a state or attention; each is a norm and one part, added to the residual."""

    def __init__(self, prefix: str, settings: NemotronLayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        """`prefix`: What the numbers of blocks follow."""
        prefixes = [f"{prefix}{settings.first_block + n}." for n in range(1 + len(settings.have_experts))]
        size, eps = settings.hidden_size, settings.eps
        self._norms = [RMSNorm(f"{prefix}norm", size, eps, dtype=dtype, device=device) for prefix in prefixes]
        self._mixer = settings.make_mixer(prefixes[0], None, dtype, device)
        self._feed_forwards = [
            NemotronExperts(prefix, settings, settings.block_experts, dtype, device)
            if has_experts and settings.block_experts is not None
            else PlainFeedForward(
                f"{prefix}mixer", size, settings.intermediate_size, settings.activation,
                has_bias=settings.has_mlp_bias, dtype=dtype, device=device,
            )
            for prefix, has_experts in zip(prefixes[1:], settings.have_experts, strict=True)
        ]  # fmt: skip

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        return collect_slots([*self._norms, self._mixer, *self._feed_forwards])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values."""
        return self._mixer.optional_slots()

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The last block's output, and the residual that the next norm adds it to."""
        first, *others = self._norms
        normed, residual = first.add(hidden, residual)
        hidden = self._mixer(normed, step)
        for norm, feed_forward in zip(others, self._feed_forwards, strict=True):
            normed, residual = norm.add(hidden, residual)
            hidden = feed_forward(normed)
        return hidden, residual


class NemotronH(StackedExpertWeights, HybridModel):
    """`NemotronHForCausalLM`: Nemotron-H, Nemotron Nano 2, and Nemotron 3 with experts."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if needs_draft_head():
            refuse(config, "mtp_hybrid_override_pattern", "*E")
            refuse(config, "mtp_layers_block_type", ["attention", "moe"], ["full_attention", "moe"])
        super().__init__(config, dtype, device)
        self._latent_size = _read_latent_size(config)

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "sliding_window")
        refuse(config, "residual_in_fp32", False)
        refuse(config, "tie_word_embeddings", False)
        has_bias, kinds = read_bool(config, "attention_bias", False), _read_kinds(config)
        settings = read_llama(
            {
                **config,
                "num_hidden_layers": len(kinds),
                "num_key_value_heads": read_int(config, "num_key_value_heads", 8),
                "head_dim": read_int(config, "head_dim", 128),
                "rms_norm_eps": read_float(config, "layer_norm_epsilon", 1e-5),
                "hidden_act": str(config.get("mlp_hidden_act") or "relu2"),
            },
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_mlp_bias=read_bool(config, "mlp_bias", False),
        )
        attention, experts = replace(settings.layers[0], rope=None), _read_experts(config)
        return replace(settings, layers=fold_blocks(attention, kinds, _read_state_space(config), experts))

    @property
    def _expert_input_size(self) -> int:
        return self._latent_size or self._hidden_size

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames:
        return HeadNames(
            layer=_DRAFT_LAYERS, embedding_norm=f"{_DRAFT_LAYERS}0.enorm", hidden_norm=f"{_DRAFT_LAYERS}0.hnorm",
            join=f"{_DRAFT_LAYERS}0.eh_proj", norm=f"{_DRAFT_LAYERS}1.final_layernorm",
        )  # fmt: skip

    def is_ignored(self, name: str) -> bool:
        """Layers that predict several tokens at once are read for drafts alone."""
        return name.startswith("mtp.") or super().is_ignored(name)

    def rename(self, name: str) -> str:
        """The name that the Llama family has for a tensor."""
        stem = name.removeprefix("backbone.").removeprefix("model.")
        own = _NAMES.get(stem, stem)
        return f"model.{own}" if own.startswith(("embed_tokens.", "norm.", "layers.")) else name


def fold_blocks(
    attention: LlamaLayerSettings,
    kinds: list[str],
    state: MixerSettings,
    experts: NemotronExpertSettings | None = None,
) -> list[LlamaLayerSettings]:
    """A layer of each block with a state or attention, with the feed-forwards behind it."""
    starts = [number for number, kind in enumerate(kinds) if kind.endswith("_attention")]
    return [
        mix_layer(
            NemotronLayerSettings,
            attention,
            first_block=start,
            state=None if kinds[start] == "full_attention" else state,
            have_experts=tuple(kind == "moe" for kind in kinds[start + 1 : stop]),
            block_experts=experts,
        )
        for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True)
    ]


def _read_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each block, by a list or by the letters of an older configuration."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        kinds = config.get("hybrid_override_pattern") or ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(kinds, list | str) or not kinds:
        raise ValueError("config.json: layers_block_type must be a list of blocks.")
    letters = _KINDS_OF_PATTERN if isinstance(kinds, str) else _OLDER_KINDS
    kinds = [letters.get(str(kind), str(kind)) for kind in kinds]
    if not {*kinds} <= {*_KINDS_OF_PATTERN.values()}:
        raise ValueError(f"config.json: blocks must be of the kinds {', '.join(_KINDS_OF_PATTERN.values())}.")
    if kinds[0] in ("mlp", "moe"):
        raise ValueError("config.json: blocks that begin with a feed-forward are not supported.")
    return kinds


def _read_state_space(config: Mapping[str, Any]) -> StateSpaceSettings:
    """The fields of a state space, some of which have other names in older configurations."""
    refuse(config, "mamba_hidden_act", "silu")
    has_bias = read_bool(config, "use_bias", False)
    settings = StateSpaceSettings(
        num_heads=read_int(config, "mamba_num_heads", 128),
        head_dim=read_int(config, "mamba_head_dim", 64),
        num_groups=read_int(config, "n_groups", read_int(config, "mamba_n_groups", 8)),
        state_size=read_int(config, "ssm_state_size", 128),
        length=read_int(config, "conv_kernel", read_int(config, "mamba_d_conv", 4)),
        has_projection_bias=has_bias,
        has_out_bias=has_bias,
        has_convolution_bias=read_bool(config, "use_conv_bias", read_bool(config, "mamba_conv_bias", True)),
        limits=read_step_limits(config),
        name="mixer",
    )
    return check_state_space(settings)


def _read_latent_size(config: Mapping[str, Any]) -> int:
    return 0 if config.get("moe_latent_size") is None else read_int(config, "moe_latent_size")


def _read_experts(config: Mapping[str, Any]) -> NemotronExpertSettings:
    routing = read_routing(config)
    num_experts, num_choices = read_int(config, "n_routed_experts", 8), read_int(config, "num_experts_per_tok", 2)
    routing.check(num_experts, num_choices)
    latent_size = _read_latent_size(config)
    experts = ExpertSettings(
        num_experts,
        num_choices,
        inner_size=read_int(config, "moe_intermediate_size", 7688),
        is_normalised=False,
        name="mixer",
        gate_name=None,
        routing=routing,
        router_size=read_int(config, "hidden_size") if latent_size else 0,
    )
    return NemotronExpertSettings(experts, read_int(config, "moe_shared_expert_intermediate_size", 7688), latent_size)
