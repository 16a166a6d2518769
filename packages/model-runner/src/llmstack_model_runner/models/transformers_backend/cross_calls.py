"""Attention calls of a decoder of transformers that attends to an encoder too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, CrossRows
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.transformers_backend.attention import (
    AttentionCall,
    AttentionLayer,
    PagedAttention,
    install,
)
from llmstack_model_runner.models.transformers_backend.probe import HARMLESS_OPTIONS, ProbeError

RunDecoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps token ids and positions, both [num_tokens], and states [1, num_vectors, size] to hidden states."""

_NUM_TOKENS, _NUM_VECTORS = 3, 2  # of a trial, by which calls are distinguished
_BIAS = "position_bias"


class GivenPositions(nn.Module):
    """The rows of a decoder's table of positions, for tokens of several requests one behind the other."""

    def __init__(self, decoder: Any, num_positions: int, device: torch.device) -> None:
        """Takes the place of the table, if `decoder` has one."""
        super().__init__()
        table = getattr(decoder, "embed_positions", None)
        self._rows: torch.Tensor | None = None
        self._padding: int | None = None
        if table is None:
            return
        takes_shape = "input_ids_shape" in inspect.signature(table.forward).parameters
        if hasattr(table, "create_position_ids_from_input_ids"):
            self._padding = int(table.padding_idx)
            self._padding_row: torch.Tensor = table(torch.tensor([[self._padding]], device=device)).flatten()
        token_ids = torch.full((1, num_positions), (self._padding or 0) + 1, device=device)
        rows: torch.Tensor = table(token_ids.shape if takes_shape else token_ids)
        self._rows = rows.reshape(num_positions, -1).detach().clone()
        decoder.embed_positions = self

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The tokens of the next call, and their places in their requests."""
        self._token_ids, self._positions = token_ids, positions

    def forward(self, *_: object, **__: object) -> torch.Tensor | None:
        """The addition to the tokens, [num_tokens, size]."""
        if self._rows is None:
            return None
        rows = self._rows[self._positions]
        if self._padding is None:
            return rows
        return torch.where(self._token_ids[:, None] == self._padding, self._padding_row, rows)


class CrossAttended:
    """Attention to a request's own tokens in its blocks, and to the encoder's states of its item."""

    def __init__(self, layers: Sequence[AttentionLayer | None], dtype: torch.dtype, device: torch.device) -> None:
        """`layers`: Of each call in their order, None for one that attends to the encoder's states."""
        self._own = PagedAttention([layer for layer in layers if layer is not None], dtype, device)
        self._are_cross = [layer is None for layer in layers]
        self.kv_layers, self.make_storage = self._own.kv_layers, self._own.make_storage
        self._rows: CrossRows | None = None
        self._next = 0
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, metadata: AttentionMetadata, kv_caches: KVCaches) -> None:
        """Starts a step, to which all calls up to the next `begin` or `keep` belong."""
        self._own.begin(metadata, kv_caches)
        self._rows, self._next, self._next_cross = metadata.cross, 0, 0

    def keep(self) -> None:
        """Ends all attention: `kept` receives the keys and values of the encoder's states instead."""
        self._rows, self._next, self.kept = None, 0, []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        is_cross, self._next = self._are_cross[self._next], self._next + 1
        if self._rows is None:
            if is_cross:
                self.kept.append((call.key.transpose(0, 1), call.value.transpose(0, 1)))
            return torch.zeros_like(call.query)
        if not is_cross:
            return self._own(replace(call, mask=None))
        rows, (keys, values) = self._rows, self._rows.caches[self._next_cross]
        self._next_cross += 1
        return paged_attention(
            AttentionInputs(
                call.query.contiguous(), keys, values, rows.query_start_loc, rows.seq_lens, rows.block_tables,
                call.scale, query_start_loc_list=rows.query_start_loc_list, seq_lens_list=rows.seq_lens_list,
                max_query_len=1,
            )
        )  # fmt: skip


def attend_to_all(call: AttentionCall) -> torch.Tensor:
    """Attention of an encoder's tokens to all of them: [num_tokens, num_heads, head_dim].

    Raises:
        ProbeError: It is of another kind.
    """
    _check(call)
    query, key, value = (states.transpose(0, 1)[None] for states in (call.query, call.key, call.value))
    bias: torch.Tensor | None = call.options.get(_BIAS)
    return F.scaled_dot_product_attention(query, key, value, bias, scale=call.scale)[0].transpose(0, 1)


def find_calls(decoder: nn.Module, run: RunDecoder, size: int, num_positions: int) -> list[AttentionLayer | None]:
    """The calls of attention in their order, as `CrossAttended` takes them.

    Raises:
        ProbeError: One is of another kind.
    """
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return torch.zeros_like(call.query)

    install(decoder, record)
    parameter = next(decoder.parameters())
    tokens = torch.arange(_NUM_TOKENS, device=parameter.device)
    run(tokens, tokens, torch.zeros(1, _NUM_VECTORS, size, dtype=parameter.dtype, device=parameter.device))
    layers: list[AttentionLayer | None] = []
    bias: torch.Tensor | None = None
    for call in calls:
        _check(call)
        if len(call.key) == _NUM_VECTORS:
            layers.append(None)
            continue
        bias = _bias_of(call, num_positions, bias)
        shape = (call.key.shape[1], call.key.shape[2], call.value.shape[2])
        layers.append(AttentionLayer(call.module, *shape, None, bias=bias))
    if layers.count(None) * 2 != len(layers):
        raise ProbeError("its layers do not each attend to tokens and to the encoder's states")
    return layers


def _check(call: AttentionCall) -> None:
    used = {name for name, value in call.options.items() if value is not None and value is not False}
    unknown = sorted((used - HARMLESS_OPTIONS - {_BIAS}) | (used & {"s_aux", "sliding_window", "softcap"}))
    if unknown:
        raise ProbeError(f"its attention needs {', '.join(unknown)[:128]}")
    if call.query.shape[1:] != call.key.shape[1:] or call.key.shape != call.value.shape:
        raise ProbeError("its keys and values have other heads than its queries")


def _bias_of(call: AttentionCall, num_positions: int, before: torch.Tensor | None) -> torch.Tensor | None:
    """The bias of the score of a key so many tokens back: the layer's own, or that of the layer before."""
    module: Any = call.module
    if not getattr(module, "has_relative_attention_bias", False):
        return before if call.options.get(_BIAS) is not None else None
    found: torch.Tensor = module.compute_bias(1, num_positions, past_seen_tokens=num_positions - 1)
    unused = found[..., :1].detach().clone()
    module.compute_bias = lambda *_, **__: unused  # one for all pairs of the step's tokens would be of no use
    return found[0, :, 0].flip(-1).detach().clone()


def row_metadata(start: int, end: int, cross: CrossRows, device: torch.device) -> AttentionMetadata:
    """A step with the tokens [start, end) of one request, in one block."""
    count = end - start
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(start, end, device=device),
        query_start_loc_list=[0, count],
        seq_lens_list=[end],
        max_query_len=count,
        max_seq_len=end,
        cross=cross,
    )
