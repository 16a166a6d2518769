"""Zamba2: state spaces of Mamba-2, and blocks of attention that layers share.

A layer with such a block is two for the KV storage: the first has keys and values, the second has a state. Each use of
a block has adapters of its own, of a low rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import RotaryEmbedding
from llmstack_model_runner.layers.state_space import StateSpaceSettings
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models.bamba import check_state_space
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayerSettings
from llmstack_model_runner.models.state_layer import HybridModel, StateLayerSettings, mix_layer
from llmstack_model_runner.models.zamba2_block import (
    AdapterSettings,
    EmbeddedTokens,
    SharedBlock,
    SharedUse,
    StateHalf,
)

_KINDS: Mapping[str, bool] = {"mamba": False, "linear_attention": False, "hybrid": True}
_PATTERN = "M" + "MMMMMH" * 7 + "MMMMH" + "MMMH" + "MM"
_NORM_EPS = 1e-5
"""Of the norm behind a state space, whatever `rms_norm_eps` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseSettings(LlamaLayerSettings):
    """Sizes of one use of a shared block.

    Attributes:
        number: Of the layer in the checkpoint.
        first_layer: The layer under whose name the checkpoint has the block.
    """

    number: int
    first_layer: int
    adapters: AdapterSettings

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The use without weights, and without its block as yet."""
        block = f"model.layers.{self.first_layer}.shared_transformer."
        return SharedUse(f"model.layers.{self.number}.", block, self, self.adapters, rotary, dtype, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHalfSettings(StateLayerSettings):
    """Sizes of a state space.

    Attributes:
        number: Of the layer in the checkpoint.
        is_behind_block: Whether what comes in is the output of a shared block.
    """

    number: int
    is_behind_block: bool

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The state space without weights."""
        prefix = f"model.layers.{self.number}.{'mamba_decoder.' if self.is_behind_block else ''}"
        norm = self.norm(f"{prefix}input_layernorm", self.hidden_size, dtype, device)
        mixer = self.mixer.make(prefix, self.hidden_size, _NORM_EPS, dtype, device)
        return StateHalf(norm, mixer, is_behind_block=self.is_behind_block)


class Zamba2(HybridModel):
    """`Zamba2ForCausalLM`; its state spaces are those of Bamba."""

    renamed: ClassVar[Mapping[str, str]] = {"final_layernorm.": "norm."}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._embedded = EmbeddedTokens()
        blocks: dict[str, SharedBlock] = {}
        for layer in self._layers:
            if isinstance(layer, SharedUse):
                if layer.block_name not in blocks:
                    blocks[layer.block_name] = layer.make_block()
                layer.share(blocks[layer.block_name], self._embedded)
        numbers = [number for number, has_block in enumerate(_read_kinds(config)) if has_block]
        names = (f"model.layers.{number}.shared_transformer." for number in numbers)
        self._copies = tuple(f".{name}" for name in names if name not in blocks)

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "hidden_act", "gelu")
        size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads", 32)
        given = next((name for name in ("attention_head_dim", "head_dim") if config.get(name) is not None), None)
        head_dim = read_head_dim(2 * size, num_heads) if given is None else read_int(config, given)
        is_long = read_bool(config, "use_long_context", False)
        settings = read_llama(
            {
                **config,
                "num_attention_heads": num_heads,
                "head_dim": head_dim,
                "hidden_act": "gelu",
                "intermediate_size": read_int(config, "intermediate_size", 4 * size),
                "max_position_embeddings": 16384 if is_long else read_int(config, "max_position_embeddings", 4096),
                "rms_norm_eps": read_float(config, "rms_norm_eps", 1e-5),
                "tie_word_embeddings": read_bool(config, "tie_word_embeddings", True),
            },
            scale=(head_dim / 2) ** -0.5,
            has_mlp_bias=read_bool(config, "add_bias_linear", False),
        )
        plain = settings.layers[0]
        layer = plain if read_bool(config, "use_mem_rope", False) else replace(plain, rope=None)
        return replace(settings, layers=_read_layers(config, layer))

    def is_ignored(self, name: str) -> bool:
        """Copies of a shared block under the names of its later uses, too."""
        return any(copy in f".{name}" for copy in self._copies) or super().is_ignored(name)

    def _enter(self, token_ids: torch.Tensor, given: StepVectors | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._sharding.is_first_stage:
            self._embedded.vectors = self._tokens(token_ids, given=given)
            return self._embedded.vectors, None
        shape = (token_ids.shape[0], self._hidden_size)
        hidden, residual, self._embedded.vectors = self._sharding.receive(3, self._like, shape)
        return hidden, residual

    def _leave(self, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        self._sharding.send([hidden, residual, self._embedded.vectors])


def _read_kinds(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has a shared block, by `layers_block_type` or in the pattern of transformers."""
    num_layers = read_int(config, "num_hidden_layers", len(_PATTERN))
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        kinds = ["hybrid" if letter == "H" else "mamba" for letter in _PATTERN]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {*_KINDS}:
        raise ValueError(f"config.json: layers_block_type must name each of {num_layers} layers mamba or hybrid.")
    return [_KINDS[str(kind)] for kind in kinds]


def _read_layers(config: Mapping[str, Any], layer: LlamaLayerSettings) -> list[LlamaLayerSettings]:
    """One of each layer without a block, and two of each with one."""
    num_blocks, mixer = read_int(config, "num_mem_blocks", 1), _read_state_space(config)
    is_tied = read_bool(config, "tie_word_embeddings", True)  # of all weights, in the code of transformers
    rank, adapts = read_int(config, "adapter_rank", 128), read_bool(config, "use_shared_attention_adapter", False)
    if adapts and {layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim} != {2 * layer.hidden_size}:
        raise ValueError("config.json: use_shared_attention_adapter needs queries and keys of twice the hidden size.")
    layers: list[LlamaLayerSettings] = []
    hybrids: list[int] = []
    for number, has_block in enumerate(_read_kinds(config)):
        if has_block:
            use = len(hybrids)
            hybrids.append(number)
            first = hybrids[use % num_blocks] if is_tied else number
            adapters = AdapterSettings(use, rank, adapts)
            layers.append(mix_layer(UseSettings, layer, number=number, first_layer=first, adapters=adapters))
        layers.append(mix_layer(StateHalfSettings, layer, mixer=mixer, number=number, is_behind_block=has_block))
    return layers


def _read_state_space(config: Mapping[str, Any]) -> StateSpaceSettings:
    """The fields of a state space, whose steps have no limits: those of the configuration are of training."""
    has_bias, num_heads = read_bool(config, "add_bias_linear", False), read_int(config, "n_mamba_heads", 8)
    inner_size = read_int(config, "mamba_expand", 2) * read_int(config, "hidden_size")
    if inner_size % num_heads:
        raise ValueError(f"config.json: {num_heads} mamba heads do not divide the inner size {inner_size}.")
    settings = StateSpaceSettings(
        num_heads=num_heads,
        head_dim=inner_size // num_heads,
        num_groups=read_int(config, "mamba_ngroups", 1),
        state_size=read_int(config, "mamba_d_state", 64),
        length=read_int(config, "mamba_d_conv", 4),
        has_projection_bias=has_bias,
        has_out_bias=has_bias,
    )
    return check_state_space(settings)
