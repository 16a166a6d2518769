"""DFlash's draft head, which guesses a whole block at once (Chen et al., 2026).

Its layers see what the served model has computed of each place as keys and values alone. A block is the last token and
places that are not known yet, all of which attend to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import Linear, RotaryEmbedding, WeightSlot, collect_slots, plan_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.models.base import CausalLM, Loadable
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.eagle import ServedSizes, head_kv_spec, read_settings
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.llama_layer import LlamaLayer

_OWN = "dflash_config"


class DFlashHead(Loadable):
    """Layers of Qwen 3 between the embedding and the output head of the served model.

    Attributes:
        kept_layers: Numbers of layers after which it reads the served model's states.
        rotary: Its rotary embedding.
        num_drafts: The most tokens that it guesses at once.
        mask_token_id: The token of a place that is not known.
    """

    root: ClassVar[str] = ""

    def __init__(
        self, config: Mapping[str, Any], served: ServedSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ValueError where the head does not fit the served model, or is of another kind."""
        own = config.get(_OWN)
        own = own if isinstance(own, Mapping) else {}
        settings, names = read_settings(config), served.tensor_names
        self._refuse_others(config, served)
        if settings.layers[0].hidden_size != served.hidden_size:
            raise ValueError(
                f"its states have {settings.layers[0].hidden_size} numbers, and those of the served model "
                f"{served.hidden_size}"
            )
        self.mask_token_id = read_int(own, "mask_token_id")
        if not 0 <= self.mask_token_id < served.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is no token of the served model")
        self.num_drafts = read_int(config, "block_size") - 1
        if not self.num_drafts:
            raise ValueError("block_size 1 is the last token alone, which leaves nothing to guess")
        self.kept_layers = tuple(layer + 1 for layer in _layer_ids(own))
        has_norms = not names or "layers.0.self_attn.q_norm.weight" in names
        settings = replace(settings, layers=[replace(layer, has_qk_norm=has_norms) for layer in settings.layers])
        layer = settings.layers[0]
        self.kv_spec = head_kv_spec(settings, dtype)
        if layer.rope is None:
            raise ValueError("its layers know no positions")
        self.rotary = RotaryEmbedding(layer.rope, device)
        size = served.hidden_size
        self._join = Linear(len(self.kept_layers) * size, {"fc": size}, has_bias=False, dtype=dtype, device=device)
        self._hidden_norm, self._norm = (layer.norm(name, size, dtype, device) for name in ("hidden_norm", "norm"))
        self._layers = [
            LlamaLayer(f"layers.{number}.", own_layer, self.rotary, dtype, device)
            for number, own_layer in enumerate(settings.layers)
        ]

    @staticmethod
    def _refuse_others(config: Mapping[str, Any], served: ServedSizes) -> None:
        refuse(config, "draft_vocab_size", None, served.vocab_size)
        if read_bool(config, "use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("its layers have a sliding window, which a block of guesses has not been built for")
        if read_int(config, "vocab_size", served.vocab_size) != served.vocab_size:
            raise ValueError(
                f"its vocabulary has {config['vocab_size']} tokens, and that of the served model {served.vocab_size}"
            )

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._join, self._hidden_norm, *self._layers, self._norm])

    def rename(self, name: str) -> str:
        return name.removeprefix("model.")

    def is_ignored(self, name: str) -> bool:
        """Copies of the served model's ends are of no use."""
        return self.rename(name) in ("embed_tokens.weight", "lm_head.weight") or super().is_ignored(name)

    def read_places(
        self, model: CausalLM, positions: torch.Tensor, slot_mapping: torch.Tensor, kv_caches: KVCaches
    ) -> None:
        """Writes keys and values of the places that `model` has just computed."""
        joined = torch.cat([states[: len(positions)] for states in model.kept_states], dim=-1)
        seen = self._hidden_norm(self._join(joined))
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            layer.write_keys_and_values(seen, positions, kv_cache, slot_mapping)

    def guess(
        self, model: CausalLM, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata,
        kv_caches: KVCaches, wanted: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Logits of the places that `wanted` counts among those of the blocks; the metadata let each see its block."""
        hidden, residual = model.embed(token_ids), None
        plans = plan_layers(metadata, kv_caches, self.kv_spec.sliding_windows)
        for layer, kv_cache, plan in zip(self._layers, kv_caches, plans, strict=True):
            hidden, residual = layer(hidden, residual, LayerStep(positions, kv_cache, *plan))
        return model.compute_logits(self._norm.add(hidden, residual)[0][wanted])


def _layer_ids(own: Mapping[str, Any]) -> list[int]:
    found = own.get("target_layer_ids")
    if not isinstance(found, list) or not found or not all(type(layer) is int and layer >= 0 for layer in found):
        raise ValueError(f"{_OWN}.target_layer_ids must be a list of numbers of layers, got {str(found)[:64]}")
    return found
