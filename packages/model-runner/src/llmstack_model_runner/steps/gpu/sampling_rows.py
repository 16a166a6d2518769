"""Sampling parameters and token counts of the persistent rows on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.sample_tokens import MAX_ENDING_TOKENS, NUM_WORDS, RowParameters, SamplingState, sample_tokens
from llmstack_model_runner.sampling.random import seeds_array
from llmstack_types import SamplingParams
from llmstack_types.field_facts import facts_of

IntArray = npt.NDArray[np.int64]

_FOR_HOST = {one.name: one.default for one in fields(SamplingParams) if facts_of(SamplingParams)[one.name].is_for_host}

_logger = logging.getLogger(__name__)


class SamplingVariant(IntEnum):
    """Features that the rows of a batch use, which decide the kernels of a captured step."""

    GREEDY = 0
    RANDOM = 1
    PENALTIES = 2


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The chosen tokens, on the device.

    Attributes:
        is_good: False if no token can be chosen, because logits are NaN or no token is allowed. The token id is then 0.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool


@dataclass(frozen=True, slots=True)
class _Staged:
    num_outputs: int
    counts: IntArray | None = None  # [2, num_distinct]: token ids, and their entries in `token_counts`


class DeviceSamplingRows:
    """Parameters by row. A row is set when a request arrives and cleared when it is removed.

    Rows without a request are never sampled, so clearing one sends nothing to the device. The extra row `scratch_row`
    is always greedy; it pads a batch to a captured size.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates 264 bytes per row on the device.

        `vocab_size`: Width of the logits.
        """
        self.scratch_row = max_num_rows
        num_rows = max_num_rows + 1
        self._vocab_size = vocab_size
        self._device = device
        self._words = np.tile(np.array(RowParameters().words(), dtype=np.int64), (num_rows, 1))
        self._is_random = np.zeros(num_rows, dtype=np.bool_)
        self._is_penalised = np.zeros(num_rows, dtype=np.bool_)
        self._staged: dict[int, _Staged] = {}
        self._state = SamplingState(
            torch.from_numpy(self._words).to(device, copy=True),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )

    @property
    def max_penalty_bytes(self) -> int:
        """Bytes of device memory that the first request with penalties allocates for good."""
        return 4 * len(self._words) * self._vocab_size

    @staticmethod
    def refusal(
        params: SamplingParams, has_processors: bool, eos_token_ids: Sequence[int] = (), *, has_drafts: bool = False
    ) -> str | None:
        """The reason why the host's `Sampler` must choose this request's tokens; None if the device can.

        It depends on the request alone, so that its tokens never depend on other requests.
        """
        if has_processors:
            return "custom logits processors"
        for name, default in _FOR_HOST.items():
            value = getattr(params, name)
            if value != default and not (isinstance(value, Sized) and not value):
                return name
        if params.use_beam_search and (params.min_tokens or params.repetition_penalty != 1.0):
            return "changed log-probabilities of beams"
        if len(_ending_token_ids(params, eos_token_ids)) > MAX_ENDING_TOKENS:
            return f"min_tokens with more than {MAX_ENDING_TOKENS} ending tokens"
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if has_drafts and penalties != (1.0, 0.0, 0.0):
            return "penalties, which count each draft for the places behind it"
        return None

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: IntArray,
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Stages a request that was not refused; `token_ids` are its prompt and its generated tokens so far."""
        parameters = _row_parameters(params, eos_token_ids, self._vocab_size)
        self._words[row] = parameters.words()
        self._is_random[row] = not params.is_greedy
        self._is_penalised[row] = parameters.has_penalties
        counts = _count(token_ids, num_prompt_tokens) if parameters.has_penalties else None
        self._staged[row] = _Staged(len(token_ids) - num_prompt_tokens, counts)

    def clear_row(self, row: int) -> None:
        """Removes the parameters of a row."""
        self._is_random[row] = self._is_penalised[row] = False
        self._staged.pop(row, None)

    def flush(self) -> None:
        """Sends all staged rows asynchronously: one copy, and one more for the tokens of rows with penalties."""
        if not self._staged:
            return
        rows = np.array(sorted(self._staged), dtype=np.int64)
        num_outputs = np.array([self._staged[row].num_outputs for row in rows.tolist()], dtype=np.int64)
        packed = self._send(np.concatenate([rows[:, None], num_outputs[:, None], self._words[rows]], axis=1))
        index = packed[:, 0].contiguous()
        self._state.num_outputs.index_copy_(0, index, packed[:, 1].contiguous())
        self._state.parameters.index_copy_(0, index, packed[:, 2 : 2 + NUM_WORDS].contiguous())
        self._flush_counts()
        self._staged.clear()

    def variant(self, rows: IntArray) -> SamplingVariant:
        """Features that a captured step for these rows needs. Valid directly after `flush`."""
        if self._is_penalised[rows].any():
            return SamplingVariant.PENALTIES
        return SamplingVariant.RANDOM if self._is_random[rows].any() else SamplingVariant.GREEDY

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        variant: SamplingVariant,
        bitmask: torch.Tensor | None = None,
        update_counts: bool = True,
        drafts: torch.Tensor | None = None,
    ) -> DeviceSample:
        """Chooses a token per row and counts it. May be captured in a graph.

        Args:
            logits: Not changed. [num_rows, vocab_size]
            rows: Distinct, except for the scratch row; without `drafts`. int32 [num_rows]
            variant: That of these rows, or one with more features.
            bitmask: See `sample_tokens`; all bits of rows without a constraint are set. int32 [num_rows, words]
            update_counts: Whether the tokens count as generated.
            drafts: See `Places.drafts`. With it no row has penalties, and no token counts before `count_kept`.
        """
        token_ids, is_good = sample_tokens(
            logits,
            rows if drafts is None else torch.arange(len(rows), dtype=torch.int32, device=rows.device),
            self._state if drafts is None else self._state_of_places(rows, drafts),
            bitmask=bitmask,
            has_random=variant != SamplingVariant.GREEDY,
            has_penalties=variant == SamplingVariant.PENALTIES,
            is_counting=update_counts and drafts is None,
        )
        return DeviceSample(token_ids, is_good)

    def count_kept(self, rows: torch.Tensor, num_kept: torch.Tensor) -> None:
        """Counts what `DeviceRows.keep_drafts` has kept of each row as generated. May be captured in a graph."""
        self._state.num_outputs.index_add_(0, rows, num_kept)  # of integers, whose sums have no order

    def _state_of_places(self, rows: torch.Tensor, drafts: torch.Tensor) -> SamplingState:
        """A row of its own for each place, as it is once all drafts before it are generated."""
        num_outputs = self._state.num_outputs.index_select(0, rows) + drafts[:, 0]
        return SamplingState(self._state.parameters.index_select(0, rows), num_outputs)

    def _flush_counts(self) -> None:
        parts = [(row, one.counts) for row, one in self._staged.items() if one.counts is not None]
        if not parts:
            return
        counts = self._token_counts()
        rows = np.repeat([row for row, _ in parts], [entries.shape[1] for _, entries in parts])
        token_ids, values = np.concatenate([entries for _, entries in parts], axis=1)
        sent = self._send(np.stack([rows * self._vocab_size + token_ids, values]))
        for row, _ in parts:
            counts[row].zero_()
        counts.view(-1).index_copy_(0, sent[0], sent[1].int())

    def _token_counts(self) -> torch.Tensor:
        counts = self._state.token_counts
        if counts is None:
            _logger.info("token counts for penalties use %.1f MB of device memory", self.max_penalty_bytes / 1e6)
            counts = torch.zeros((len(self._words), self._vocab_size), dtype=torch.int32, device=self._device)
            self._state = SamplingState(self._state.parameters, self._state.num_outputs, counts)
        return counts

    def _send(self, values: IntArray) -> torch.Tensor:
        """A copy on the device, through new pinned memory each time, since an earlier copy may be in flight."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _row_parameters(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> RowParameters:
    """Parameters in the precision of the host's sampler."""
    # A temperature that float32 rounds to 0 would compute 0/0; this one is effectively greedy.
    smallest = float(np.finfo(np.float32).tiny)
    return RowParameters(
        temperature=0.0 if params.is_greedy else float(np.float32(max(params.temperature, smallest))),
        top_k=min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size,
        top_p=params.top_p,
        min_p=float(np.float32(params.min_p)),
        seed=int(seeds_array([params.seed or 0]).astype(np.int64)[0]),
        min_tokens=_min_tokens(params),
        repetition=float(np.float32(params.repetition_penalty)),
        frequency=float(np.float32(params.frequency_penalty)),
        presence=float(np.float32(params.presence_penalty)),
        ending_token_ids=[one for one in _ending_token_ids(params, eos_token_ids) if 0 <= one < vocab_size],
    )


def _min_tokens(params: SamplingParams) -> int:
    # The grammar of a constrained row decides whether the row may end.
    return 0 if params.structured_outputs is not None else params.min_tokens


def _ending_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Token ids that `min_tokens` masks; empty without `min_tokens`."""
    return sorted({*eos_token_ids, *(params.stop_token_ids or ())}) if _min_tokens(params) else []


def _count(token_ids: IntArray, num_prompt_tokens: int) -> IntArray:
    """Distinct tokens, and twice the output count of each, plus one if it is in the prompt: [2, num_distinct]."""
    distinct, inverse = np.unique(np.asarray(token_ids, dtype=np.int64), return_inverse=True)
    num_generated = np.bincount(inverse[num_prompt_tokens:], minlength=len(distinct))
    is_in_prompt = np.bincount(inverse[:num_prompt_tokens], minlength=len(distinct)) > 0
    return np.stack([distinct, 2 * num_generated + is_in_prompt]).astype(np.int64)
