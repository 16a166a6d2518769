"""Probe of an encoder of transformers: whether its rows can be packed in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from llmstack_model_runner.models.transformers_backend.attention import AttentionCall, MaskRule, mask_rule
from llmstack_model_runner.models.transformers_backend.encoder_rows import RowsRun
from llmstack_model_runner.models.transformers_backend.probe import (
    HARMLESS_OPTIONS,
    ROUNDING,
    ProbeError,
    Run,
    poisoned,
    run_without_attention,
)
from llmstack_model_runner.models.transformers_backend.row_attention import RowLayer

_NUM_TOKENS = 10
_ROW_LENGTHS = (3, 9, 1, 6, 9)
_LONGEST_TRIED = 96
_HARMLESS = HARMLESS_OPTIONS | {"deterministic"}


class Rows(NamedTuple):
    """Rows for a trial: token ids and positions, both [num_tokens], and the first token of each row, and the end."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    starts: list[int]


def find_row_layers(model: nn.Module, run: Run, dtype: torch.dtype, num_positions: int) -> list[RowLayer]:
    """The attention layers in the order of their calls, each with its window.

    Raises:
        ProbeError: The attention is of another kind.
    """
    calls, _ = run_without_attention(model, run, range(min(_NUM_TOKENS, num_positions)))
    if not calls:
        raise ProbeError("it calls no attention that can be replaced")
    for call in calls:
        _check_call(call, dtype)
    return [RowLayer(call.module, _reach(call, num_positions)) for call in calls]


def trial_rows(
    vocab_size: int, num_positions: int, device: torch.device, layers: Sequence[RowLayer] = ()
) -> Rows:  # fmt: skip
    """Rows of several lengths, some equal, and one beyond each window that is not too wide for a trial."""
    reaches = {layer.reach for layer in layers if layer.reach is not None}
    beyond = [reach + 5 for reach in sorted(reaches) if reach + 5 <= _LONGEST_TRIED]
    lengths = [min(length, num_positions) for length in (*_ROW_LENGTHS, *beyond)]
    starts = [0, *accumulate(lengths)]
    generator = torch.Generator().manual_seed(0)
    # The lowest ids are those of padding and the like, which some models look at.
    token_ids = torch.randint(min(8, vocab_size - 1), vocab_size, (starts[-1],), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Rows(token_ids.to(device), positions.to(device), starts)


def check_rows(compute: RowsRun, expected: Mapping[int, torch.Tensor], rows: Rows) -> None:
    """Runs several rows at once, and requires for each what transformers computes for it alone.

    `expected`: The hidden states of each row, by its start.

    Raises:
        ProbeError: A row differs by more than rounding.
    """
    together = compute(*rows)
    for start, alone in expected.items():
        difference = (together[start : start + len(alone)] - alone).abs().max()
        if not difference <= ROUNDING[alone.dtype] * alone.abs().max():  # NaN is a difference
            raise ProbeError("rows in one batch get other states than each of them alone")


def check_rows_are_apart(embedding: nn.Module, compute: RowsRun, rows: Rows) -> None:
    """Runs rows of which only the second is not NaN, and requires that it is finite; so the check needs no tolerance.

    Raises:
        ProbeError: Something but attention connects rows.
    """
    first, end = rows.starts[1:3]
    with poisoned(embedding, slice(0, first), slice(end, None)):
        hidden = compute(*rows)
    if not hidden[first:end].isfinite().all():
        raise ProbeError("tokens of one request change those of another in the same batch")


def check_first_sees_last(compute: RowsRun, rows: Rows) -> None:
    """Runs a row twice, with another last token, and requires another state of the first one.

    Raises:
        ProbeError: The model is a decoder, whose vectors others than an encoder's defaults are for.
    """
    length = rows.starts[1]
    first = compute(rows.token_ids[:length], rows.positions[:length], [0, length])[0]
    token_ids = rows.token_ids[:length].clone()
    token_ids[-1] = rows.token_ids[length]
    if torch.equal(first, compute(token_ids, rows.positions[:length], [0, length])[0]):
        raise ProbeError("it is no encoder, since its tokens attend to none behind them")


def check_last_position(compute: RowsRun, vocab_size: int, num_positions: int, device: torch.device) -> None:
    """Runs one row of one token at the last position; raises what the model's code does where it has fewer."""
    token_ids = torch.full((1,), vocab_size - 1, device=device)
    compute(token_ids, torch.full((1,), num_positions - 1, device=device), [0, 1])


def _check_call(call: AttentionCall, dtype: torch.dtype) -> None:
    if call.query.shape[0] != call.key.shape[0] or call.key.shape != call.value.shape:
        raise ProbeError("its keys and values have other shapes than each other")
    if call.query.shape[2] != call.key.shape[2] or call.query.shape[1] % call.key.shape[1]:
        raise ProbeError(f"its query heads do not share {call.key.shape[1]} key-value heads evenly")
    if any(states.dtype != dtype for states in (call.query, call.key, call.value)):
        raise ProbeError("its keys and values are of another type than its weights")
    used = {name for name, value in call.options.items() if value is not None and value is not False}
    unknown = sorted((used - _HARMLESS) | (used & {"softcap", "s_aux"}))
    if unknown:
        raise ProbeError(f"its attention needs {', '.join(unknown)[:128]}")
    if call.options.get("dropout"):
        raise ProbeError("its attention drops values at random")


def _reach(call: AttentionCall, num_positions: int) -> int | None:
    """The window on either side: from the mask, if there is one; None for a whole row."""
    if call.mask is None:
        is_causal = call.options.get("is_causal", getattr(call.module, "is_causal", True))
        if is_causal is not False or call.options.get("sliding_window") is not None:
            raise ProbeError("its attention says neither by a mask nor otherwise what a token sees")
        return None
    rule = mask_rule(call.mask)
    if rule is None:
        raise ProbeError("its attention has a mask of its own")
    place = num_positions // 2
    seen = _seen(rule, torch.tensor([place]), num_positions)[0].nonzero().flatten()
    reach = place - int(seen[0]) if len(seen) else 0
    window = None if reach == place else reach
    distance = reach if window is not None else num_positions
    queries = {q for center in (0, reach, 2 * reach, place, num_positions - reach, num_positions - 1) for q in
               range(center - 2, center + 3) if 0 <= q < num_positions}  # fmt: skip
    query = torch.tensor(sorted(queries))
    expected = (query[:, None] - torch.arange(num_positions)).abs() <= distance
    if not torch.equal(_seen(rule, query, num_positions), expected):
        raise ProbeError("its tokens attend neither to the whole prompt nor to a window around them")
    return window


def _seen(rule: MaskRule, query: torch.Tensor, num_positions: int) -> torch.Tensor:
    zero = torch.tensor(0)
    return torch.as_tensor(rule(zero, zero, query[:, None], torch.arange(num_positions))).expand(
        len(query), num_positions
    )
