"""Probe of a model of transformers: the attention it needs, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.models.transformers_backend.attention import (
    AttentionCall,
    AttentionLayer,
    MaskRule,
    PagedAttention,
    install,
    mask_rule,
)
from llmstack_model_runner.models.transformers_backend.modules import LinearLayer
from llmstack_model_runner.models.transformers_backend.resolve import max_model_len, num_selected

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps (token ids, positions), both [num_tokens], to hidden states [num_tokens, hidden_size]."""

_ROW_LENGTHS = (3, 4, 3)
_NUM_TOKENS = sum(_ROW_LENGTHS)
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of the largest number, what products of other rows may change; positions change more."""

# Keyword arguments of layers that change no result here; `s_aux` (sinks), `sliding_window` and `softcap` are supported.
HARMLESS_OPTIONS = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "position_embeddings",
    "position_ids", "return_dict", "s_aux", "sliding_window", "softcap", "use_cache",
})  # fmt: skip


class ProbeError(Exception):
    """Paged attention does not support the model; the message is the reason, without a full stop."""


def find_layers(model: nn.Module, run: Run, dtype: torch.dtype, config: PreTrainedConfig) -> list[AttentionLayer]:
    """The attention layers in the order of their calls.

    Raises:
        ProbeError: The attention is of another kind.
    """
    calls, _ = run_without_attention(model, run, range(_NUM_TOKENS))
    if not calls:
        raise ProbeError("it calls no attention that can be replaced")
    for call in calls:
        _check_shape(call, dtype)
        _check_options(call, _selected_by(call, config))
    return _layers_of(calls, config)


def check_only_attention_connects(model: nn.Module, embedding: nn.Module, run: Run) -> None:
    """Runs tokens that attend to themselves alone, some of them NaN, and requires that the others are finite.

    What connects the tokens of a request outside attention, such as a convolution or a recurrent state, spreads NaN.
    The storage does not keep it, so it would be lost where a request is cut into steps.

    Raises:
        ProbeError: Tokens are connected.
    """
    first, end = _ROW_LENGTHS[0], _ROW_LENGTHS[0] + _ROW_LENGTHS[1]
    with poisoned(embedding, slice(0, first), slice(end, None)):
        _, hidden = run_without_attention(model, run, range(_NUM_TOKENS))
    if not hidden[first:end].isfinite().all():
        raise ProbeError("its layers keep a state of their own beside keys and values")


def find_linears_of_tokens(model: nn.Module, embedding: nn.Module, run: Run) -> list[LinearLayer]:
    """The linear layers that each step calls once, with one row per token in order. Layers of experts are others.

    Some tokens are NaN in the trial, so a row of a layer shows which token it belongs to.
    """
    is_poisoned = torch.zeros(_NUM_TOKENS, dtype=torch.bool)
    is_poisoned[: _ROW_LENGTHS[0]] = is_poisoned[-_ROW_LENGTHS[2] :] = True
    found: dict[LinearLayer, int] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        is_in_order = len(rows) == _NUM_TOKENS and torch.equal(rows.isnan().any(-1).cpu(), is_poisoned)
        if isinstance(layer, LinearLayer):
            found[layer] = found.get(layer, 0) + (1 if is_in_order else 2)

    layers = [module for module in model.modules() if isinstance(module, LinearLayer)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with poisoned(embedding, slice(0, _ROW_LENGTHS[0]), slice(_NUM_TOKENS - _ROW_LENGTHS[2], None)):
            run_without_attention(model, run, range(_NUM_TOKENS))
    finally:
        for handle in handles:
            handle.remove()
    return [layer for layer in layers if found.get(layer) == 1]


def run_without_attention(
    model: nn.Module, run: Run, token_ids: Sequence[int]
) -> tuple[list[AttentionCall], torch.Tensor]:
    """The calls and the hidden states of tokens at positions from 0 on, where each token attends to itself alone."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.value.repeat_interleave(-(-call.query.shape[1] // call.value.shape[1]), 1)[:, : call.query.shape[1]]

    install(model, record)
    device = device_of(model)
    hidden = run(torch.tensor(token_ids, device=device), torch.arange(len(token_ids), device=device))
    return calls, hidden


def _has_positions(model: nn.Module, run: Run) -> bool:
    """Whether anything but a mask differs between two places where a request has the same token."""
    calls, hidden = run_without_attention(model, run, (0, 1, 0, 1))
    seen = (hidden, *(states for call in calls for states in (call.query, call.key, call.value)))
    return any((x[0] - x[2]).abs().max() > ROUNDING[x.dtype] * x.abs().max() for x in seen)


def check_rows_are_independent(model: nn.Module, embedding: nn.Module, run: Run, attention: PagedAttention) -> None:
    """Runs three requests in one batch, two of which are NaN, and requires a finite result of the third.

    Anything that connects requests outside attention, such as a convolution or a recurrent state, spreads NaN. So the
    check needs no tolerance.

    Raises:
        ProbeError: Requests are connected, or the model ignores the given positions.
    """
    first, end = _ROW_LENGTHS[0], _ROW_LENGTHS[0] + _ROW_LENGTHS[1]
    positions = [position for length in _ROW_LENGTHS for position in range(length)]
    with poisoned(embedding, slice(0, first), slice(end, None)):
        hidden = run_rows(model, run, attention, _ROW_LENGTHS, positions)
    if not hidden[first:end].isfinite().all():
        raise ProbeError("tokens of one request change those of another in the same batch")
    row = run_rows(model, run, attention, [4], [0, 1, 2, 3])
    is_ignored = torch.equal(row, run_rows(model, run, attention, [4], [0, 2, 3, 6]))
    if is_ignored and _has_positions(model, run):
        raise ProbeError("it ignores the positions that it is given")


def run_rows(
    model: nn.Module, run: Run, attention: PagedAttention, lengths: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Hidden states of whole requests, one block each, in a temporary storage."""
    device = device_of(model)
    attention.begin(_metadata(lengths, max(lengths), device), attention.make_storage(len(lengths), max(lengths)))
    return run(torch.arange(sum(lengths), device=device), torch.tensor(positions, device=device))


def _layers_of(calls: Sequence[AttentionCall], config: PreTrainedConfig) -> list[AttentionLayer]:
    """The layers; keys and values that an earlier call has too, and that a window lets both see, are kept once."""
    layers: list[AttentionLayer] = []
    known: dict[tuple[object, ...], int] = {}
    for index, call in enumerate(calls):
        num_kv_heads, head_dim, value_dim = call.key.shape[1], call.key.shape[2], call.value.shape[2]
        window = _window(call, config)
        memory = (*(place for x in (call.key, call.value) for place in (x.data_ptr(), x.shape, x.stride())), window)
        source = known.setdefault(memory, index)
        shared = None if source == index else source
        selected = _selected_by(call, config)
        layers.append(AttentionLayer(call.module, num_kv_heads, head_dim, value_dim, window, shared, selected))
    return layers


def _check_shape(call: AttentionCall, dtype: torch.dtype) -> None:
    if call.key.shape[:2] != call.value.shape[:2] or call.query.shape[0] != call.key.shape[0]:
        raise ProbeError("its keys and values have other tokens or heads than each other")
    if call.query.shape[1] % call.key.shape[1]:
        raise ProbeError(f"its query heads do not share {call.key.shape[1]} key-value heads evenly")
    if any(states.dtype != dtype for states in (call.query, call.key, call.value)):
        raise ProbeError("its keys and values are of another type than its weights")


def _selected_by(call: AttentionCall, config: PreTrainedConfig) -> int | None:
    """Tokens that an indexer selects for the call; None without one."""
    return num_selected(config) if call.options.get("indices") is not None else None


def _check_options(call: AttentionCall, selected: int | None) -> None:
    used = {name for name, value in call.options.items() if value is not None and value is not False}
    unknown = sorted(used - HARMLESS_OPTIONS - ({"indices"} if selected else set()))
    if unknown:
        raise ProbeError(f"its attention needs {', '.join(unknown)[:128]}")
    sinks = call.options.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (call.query.shape[1],):
        raise ProbeError("its attention has sinks that are not one number per head")
    if call.options.get("dropout"):
        raise ProbeError("its attention drops values at random")
    if call.options.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        raise ProbeError("its attention looks ahead")


def _window(call: AttentionCall, config: PreTrainedConfig) -> int | None:
    """The layer's sliding window: from the mask, if there is one, else from the layer's arguments."""
    passed: int | None = call.options.get("sliding_window")
    if call.mask is None:
        return passed
    rule = mask_rule(call.mask)
    for window in (passed, getattr(config, "sliding_window", None), None):
        if rule is not None and _is_causal(rule, window, max_model_len(config)):
            return window
    raise ProbeError("its attention is neither causal nor a sliding window")


def _is_causal(rule: MaskRule, window: int | None, num_positions: int) -> bool:
    """Whether `rule` is causal, or a sliding window of `window` tokens; evaluated at distinctive positions."""
    width = window or num_positions
    centers = {0, width, 2 * width, *(1 << bit for bit in range(num_positions.bit_length()))}
    queries = {query for center in centers for query in range(center - 2, center + 3) if 0 <= query < num_positions}
    edges = {query - width + shift for query in queries for shift in (-1, 0, 1)}
    query = torch.tensor(sorted(queries))[:, None]
    key = torch.tensor(sorted(queries | {edge for edge in edges if edge >= 0}))
    zero = torch.tensor(0)
    expected = (key <= query) & (key > query - width)
    return torch.equal(torch.as_tensor(rule(zero, zero, query, key)).expand_as(expected), expected)


@contextmanager
def poisoned(embedding: nn.Module, *rows: slice) -> Iterator[None]:
    """Makes the embeddings of some tokens NaN, which shows what depends on them."""

    def poison(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        for part in rows:
            output[:, part] = torch.nan
        return output

    handle = embedding.register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()


def _metadata(lengths: Sequence[int], block_size: int, device: torch.device) -> AttentionMetadata:
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    slots = [row * block_size + position for row, length in enumerate(lengths) for position in range(length)]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.arange(len(lengths), dtype=torch.int32, device=device)[:, None],
        slot_mapping=torch.tensor(slots, device=device),
        query_start_loc_list=starts,
        seq_lens_list=list(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )


def device_of(model: nn.Module) -> torch.device:
    """The device of the weights of a model."""
    return next(model.parameters()).device
