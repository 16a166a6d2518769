"""Probe of a model of transformers: the attention it needs, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from llmstack_model_runner.models.transformers_backend.resolve import max_model_len

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps (token ids, positions), both [num_tokens], to hidden states [num_tokens, hidden_size]."""

_ROW_LENGTHS = (3, 4, 3)
_NUM_TOKENS = sum(_ROW_LENGTHS)

# Keyword arguments of layers that change no result here; `sliding_window` and `softcap` are supported.
_HARMLESS_OPTIONS = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "softcap", "use_cache",
})  # fmt: skip


class ProbeError(Exception):
    """Paged attention does not support the model; the message is the reason, without a full stop."""


def find_layers(model: nn.Module, run: Run, dtype: torch.dtype, config: PreTrainedConfig) -> list[AttentionLayer]:
    """The attention layers in the order of their calls.

    Raises:
        ProbeError: The attention is of another kind, layers have different shapes, or a layer does not attend once.
    """
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.query.new_zeros((*call.query.shape[:2], call.value.shape[2]))

    install(model, record)
    device = _device(model)
    run(torch.arange(_NUM_TOKENS, device=device), torch.arange(_NUM_TOKENS, device=device))
    num_layers, num_modules = config.num_hidden_layers, len({call.module for call in calls})
    if len(calls) != num_layers or num_modules != num_layers:
        raise ProbeError(f"{num_layers} layers call attention {len(calls)} times in {num_modules} places")
    _check_shapes(calls, dtype)
    for call in calls:
        _check_options(call)
    return [AttentionLayer(call.module, call.key.shape[1], call.key.shape[2], _window(call, config)) for call in calls]


def check_rows_are_independent(model: nn.Module, embedding: nn.Module, run: Run, attention: PagedAttention) -> None:
    """Runs three requests in one batch, two of which are NaN, and requires a finite result of the third.

    Anything that connects requests outside attention, such as a convolution or a recurrent state, spreads NaN. So the
    check needs no tolerance.

    Raises:
        ProbeError: Requests are connected, or the model ignores the given positions.
    """
    first, end = _ROW_LENGTHS[0], _ROW_LENGTHS[0] + _ROW_LENGTHS[1]
    positions = [position for length in _ROW_LENGTHS for position in range(length)]
    with _poisoned(embedding, slice(0, first), slice(end, None)):
        hidden = run_rows(model, run, attention, _ROW_LENGTHS, positions)
    if not hidden[first:end].isfinite().all():
        raise ProbeError("tokens of one request change those of another in the same batch")
    row = run_rows(model, run, attention, [4], [0, 1, 2, 3])
    if torch.equal(row, run_rows(model, run, attention, [4], [0, 2, 3, 6])):
        raise ProbeError("it ignores the positions that it is given")


def run_rows(
    model: nn.Module, run: Run, attention: PagedAttention, lengths: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Hidden states of whole requests, one block each, in a temporary storage."""
    device = _device(model)
    attention.begin(_metadata(lengths, max(lengths), device), attention.make_storage(len(lengths), max(lengths)))
    return run(torch.arange(sum(lengths), device=device), torch.tensor(positions, device=device))


def _check_shapes(calls: Iterable[AttentionCall], dtype: torch.dtype) -> None:
    shapes = {(call.key.shape[1], call.key.shape[2], call.value.shape[2]) for call in calls}
    if len(shapes) > 1:
        raise ProbeError("its layers have keys or values of different shapes")
    for num_kv_heads, key_dim, value_dim in shapes:
        if key_dim != value_dim:
            raise ProbeError(f"its keys have {key_dim} dimensions and its values {value_dim}")
        if any(call.query.shape[1] % num_kv_heads for call in calls):
            raise ProbeError(f"its query heads do not share {num_kv_heads} key-value heads evenly")
    if any(states.dtype != dtype for call in calls for states in (call.query, call.key, call.value)):
        raise ProbeError("its keys and values are of another type than its weights")


def _check_options(call: AttentionCall) -> None:
    used = [name for name, value in call.options.items() if value is not None and value is not False]
    unknown = sorted(set(used) - _HARMLESS_OPTIONS)
    if unknown:
        raise ProbeError(f"its attention needs {', '.join(unknown)[:128]}")
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
def _poisoned(embedding: nn.Module, *rows: slice) -> Iterator[None]:
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


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
