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
from llmstack_model_runner.layers.attention import plan_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, AttentionPlans
from llmstack_model_runner.layers.kv_scales import KVScales
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec, TokenTensor
from llmstack_model_runner.models.transformers_backend.distance_bias import attend_with_bias

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
    """A call of attention as the probe observed it.

    Attributes:
        value_dim: Width of a value, which differs from that of a key in some models.
        source: The earlier call with the same keys and values, which are kept once; None where they are its own.
        num_selected: Tokens that the layer selects of a context, if it does: no more than those attend to all.
        bias: What is added to the scores of a key so many tokens back, [num_heads, num_positions]; None for nothing.
    """

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    source: int | None = None
    num_selected: int | None = None
    bias: torch.Tensor | None = None


class PagedAttention:
    """Attention over the blocks of the current step; layers are numbered in the order of their calls."""

    def __init__(self, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = list(layers)
        self._dtype = dtype
        self._device = device
        stored = [index for index, layer in enumerate(layers) if layer.source is None]
        place_of = {index: place for place, index in enumerate(stored)}
        self._places = [place_of[index if layer.source is None else layer.source] for index, layer in enumerate(layers)]
        self._kv_scales = [KVScales(layers[index].num_kv_heads, device) for index in stored]
        self._sliding_windows = [layers[index].sliding_window for index in stored]
        self.kv_layers = tuple(self._spec_of(layers[index]) for index in stored)
        self._has_one_shape = len({layer.tensors for layer in self.kv_layers}) == 1
        self._next = 0
        self._kv_caches: KVCaches
        self._planned: list[tuple[AttentionMetadata, AttentionPlans]]

    def _spec_of(self, layer: AttentionLayer) -> LayerKVSpec:
        """The memory of a layer for a token.

        Keys are as wide as values at least, which no kernel needs to know. On a GPU values are as wide as keys, since
        its kernels read both alike.
        """
        key_dim = max(layer.head_dim, layer.value_dim)
        value_dim = key_dim if self._device.type == "cuda" else layer.value_dim
        tensors = (
            TokenTensor("keys", layer.num_kv_heads, key_dim),
            TokenTensor("values", layer.num_kv_heads, value_dim),
        )
        return LayerKVSpec(tensors, sliding_window=layer.sliding_window)

    def make_storage(self, num_blocks: int, block_size: int) -> KVCaches:
        """Blocks for every layer, filled with NaN, so that a read of unwritten memory is visible."""

        def blocks(tensor: TokenTensor) -> torch.Tensor:
            shape = (num_blocks, tensor.num_heads, block_size, tensor.width)
            return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)

        return [tuple(map(blocks, layer.tensors)) for layer in self.kv_layers]

    def begin(self, metadata: AttentionMetadata, kv_caches: KVCaches) -> None:
        """Starts a step, to which all calls up to the next `begin` belong."""
        self._kv_caches = kv_caches
        self._next = 0
        self._planned = plan_layers(metadata, kv_caches, self._sliding_windows)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer, place = self._layers[self._next], self._places[self._next]
        if layer.module is not call.module:
            raise RuntimeError("the model calls its attention in another order than before")
        if call.mask is not None and mask_rule(call.mask) is None:
            raise RuntimeError("the model's attention has a mask of its own")
        self._next += 1
        key_cache, value_cache = self._kv_caches[place]
        metadata, plans = self._planned[place]
        key_scale, value_scale = scales = self._kv_scales[place].of(key_cache)
        if layer.source is None:
            _write(call, key_cache, value_cache, metadata.slot_mapping, scales)
        if layer.bias is not None:
            return attend_with_bias(call.query, call.scale, (key_cache, value_cache), scales, metadata, layer.bias)
        sinks = call.options.get("s_aux")
        attended = paged_attention(
            AttentionInputs(
                widen(call.query, key_cache.shape[3]).contiguous(),
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                call.scale,
                query_start_loc_list=metadata.query_start_loc_list,
                seq_lens_list=metadata.seq_lens_list,
                max_query_len=metadata.max_query_len,
                sliding_window=layer.sliding_window,
                soft_cap=call.options.get("softcap"),
                sinks=None if sinks is None else sinks.float(),
                key_scale=key_scale,
                value_scale=value_scale,
                # A plan holds for caches of one shape.
                plan=plans.get(layer.sliding_window) if self._has_one_shape else None,
            )
        )
        return attended if attended.shape[2] == layer.value_dim else attended[..., : layer.value_dim]


def _write(
    call: AttentionCall,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Writes keys and values, which may have different widths, to their slots."""
    key, value = (widen(x, cache.shape[3]) for x, cache in ((call.key, key_cache), (call.value, value_cache)))
    if key.shape == value.shape:
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *scales)
        return
    for states, cache, scale in ((key, key_cache, scales[0]), (value, value_cache, scales[1])):
        reshape_and_cache(states, None, cache, None, slot_mapping, scale)


def widen(states: torch.Tensor, width: int) -> torch.Tensor:
    """The states with zeros behind them up to a width, which change no product."""
    return states if states.shape[2] == width else nn.functional.pad(states, (0, width - states.shape[2]))


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


class _RuledMask(torch.Tensor):
    """A mask with its rule, which a slice of all of it has too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func is torch.Tensor.__getitem__ and result.shape == args[0].shape:
            setattr(result, _RULE_ATTRIBUTE, mask_rule(args[0]))
        return result


def _mask_function(q_length: int = 1, kv_length: int = 1, mask_function: Any = None, **_: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, int(q_length), int(kv_length)).as_subclass(_RuledMask)
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
