"""Attention function for the layers of transformers, over paged KV storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention
from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_model_runner.layers.attention import AttentionPlans, plan_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.kv_scales import KVScales
from llmstack_model_runner.models.kv_spec import KVCaches

IMPLEMENTATION = "llmstack_paged"
"""Name in transformers' table of attention functions. It is in no table of masks, so models create none."""

PROBE_IMPLEMENTATION = "llmstack_paged_probe"
"""Name of the same function that is in the table of masks too, so that models pass their mask rules to the probe."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps (batch, head, query position, key position), all int64 scalars, to whether the key is visible."""

_ATTEND_ATTRIBUTE = "llmstack_attend"
_RULE_ATTRIBUTE = "llmstack_rule"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention over flat tokens.

    Attributes:
        mask: The model's mask; None in serving, where no masks are created.
        options: All other keyword arguments of the call.
    """

    module: nn.Module
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    mask: torch.Tensor | None
    scale: float
    options: dict[str, Any]


class Attend(Protocol):
    """Computes attention for a layer's call."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Output of attention: [num_tokens, num_heads, value_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer as the probe observed it."""

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


class PagedAttention:
    """Attention over the blocks of the current step; layers are numbered in the order of their calls."""

    def __init__(self, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = list(layers)
        self._dtype = dtype
        self._device = device
        self._module_to_layer = {layer.module: (index, layer.sliding_window) for index, layer in enumerate(layers)}
        self._kv_scales = [KVScales(layer.num_kv_heads, device) for layer in layers]
        self._sliding_windows = [layer.sliding_window for layer in layers]
        self._kv_caches: KVCaches
        self._planned: list[tuple[AttentionMetadata, AttentionPlans]]

    def make_storage(self, num_blocks: int, block_size: int) -> KVCaches:
        """Blocks for every layer, filled with NaN, so that a read of unwritten memory is visible."""

        def blocks(layer: AttentionLayer) -> torch.Tensor:
            shape = (num_blocks, layer.num_kv_heads, block_size, layer.head_dim)
            return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)

        return [(blocks(layer), blocks(layer)) for layer in self._layers]

    def begin(self, metadata: AttentionMetadata, kv_caches: KVCaches) -> None:
        """Starts a step, to which all calls up to the next `begin` belong."""
        self._kv_caches = kv_caches
        self._planned = plan_layers(metadata, kv_caches[0][0], self._sliding_windows)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        index, sliding_window = self._module_to_layer[call.module]
        key_cache, value_cache = self._kv_caches[index]
        metadata, plans = self._planned[index]
        key_scale, value_scale = scales = self._kv_scales[index].of(key_cache)
        reshape_and_cache(call.key, call.value, key_cache, value_cache, metadata.slot_mapping, *scales)
        return paged_attention(
            AttentionInputs(
                call.query.contiguous(),
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                call.scale,
                query_start_loc_list=metadata.query_start_loc_list,
                seq_lens_list=metadata.seq_lens_list,
                max_query_len=metadata.max_query_len,
                sliding_window=sliding_window,
                soft_cap=call.options.get("softcap"),
                key_scale=key_scale,
                value_scale=value_scale,
                plan=plans[sliding_window],
            )
        )


def register_attention() -> None:
    """Registers both names with transformers. Idempotent, since the functions have no state."""
    AttentionInterface.register(IMPLEMENTATION, _attention_function)
    AttentionInterface.register(PROBE_IMPLEMENTATION, _attention_function)
    AttentionMaskInterface.register(PROBE_IMPLEMENTATION, _mask_function)


def mask_rule(mask: torch.Tensor) -> MaskRule | None:
    """The rule of a mask that was created for the probe; None for a mask that the model created by other means."""
    return getattr(mask, _RULE_ATTRIBUTE, None)


def install(model: nn.Module, attend: Attend) -> None:
    """Makes the layers of `model` call `attend`."""
    for module in model.modules():
        # Not by nn.Module.__setattr__, which would register an `attend` that is a module as a child.
        module.__dict__[_ATTEND_ATTRIBUTE] = attend


def _mask_function(q_length: int = 1, kv_length: int = 1, mask_function: Any = None, **_: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, int(q_length), int(kv_length))
    setattr(mask, _RULE_ATTRIBUTE, mask_function)
    return mask


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attend: Attend = module.__dict__[_ATTEND_ATTRIBUTE]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(AttentionCall(module, query, key, value, attention_mask, scale, options)).unsqueeze(0), None
