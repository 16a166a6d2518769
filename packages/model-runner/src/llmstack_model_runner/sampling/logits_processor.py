"""Custom logits processors: protocol, loading, and notification of row changes."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.lean_torch import import_parts
from llmstack_types import SamplingParams

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "llmstack.logits_processors"
_METHODS = ("is_argmax_invariant", "update_state", "apply")


class LogitsProcessorError(ValueError):
    """A logits processor cannot be loaded or violates the protocol; the message names it."""


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A request that is new, or resumed after a preemption.

    Attributes:
        row: Row number while the request runs; numbers of removed requests are reused.
        params: Sampling parameters; `extra_args` holds the user's arguments for processors.
        num_prompt_tokens: Number of prompt tokens at the start of `token_ids`.
        token_ids: Tokens of the request, read-only, updated in place. In each step the prompt and the next
            `LogitsRows.num_output_tokens` tokens are valid. [max_num_tokens]
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Requests of the rows of one step's logits; parallel arrays.

    Attributes:
        rows: `AddedRow.row` of each row of the logits; a request whose drafts are verified has several.
        num_output_tokens: Number of tokens generated before the one that is chosen here.
    """

    rows: npt.NDArray[np.int64]  # [num_logits]
    num_output_tokens: npt.NDArray[np.int64]  # [num_logits]


class LogitsProcessor(Protocol):
    """Changes the logits of some requests of each batch. There is one object per engine, called by one thread."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates state; row numbers are below `max_num_rows`."""

    def is_argmax_invariant(self) -> bool:
        """Whether the processor never changes the most likely token. Called once.

        Such a processor is applied after temperature, to random rows only. Others are applied before penalties, to all
        rows.
        """

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        """Notifies of removed rows, then of added rows; called between steps if there are any.

        After an error it is called again for each row, so that only the requests end at which it fails again.
        """

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """The changed logits, which may be `logits` changed in place: float32 [num_logits, vocab_size]."""


class LogitsProcessorType(Protocol):
    """A class of logits processors."""

    def __call__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessor:
        """Constructs a processor of the engine."""


class LogitsProcessors:
    """The processors of one engine, and the row changes that they have not been notified of."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._all = tuple(processors)
        is_invariant = [processor.is_argmax_invariant() for processor in processors]
        self._before = tuple(one for one, is_late in zip(processors, is_invariant, strict=True) if not is_late)
        self._after = tuple(one for one, is_late in zip(processors, is_invariant, strict=True) if is_late)
        self._removed: list[int] = []
        self._added: dict[int, AddedRow] = {}
        self._failed: dict[int, Exception] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add_row(
        self, row: int, params: SamplingParams, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int
    ) -> None:
        """Queues an added row; `token_ids` is the row's part of the batch's array."""
        view = token_ids.view()
        view.flags.writeable = False
        self._added[row] = AddedRow(row, params, num_prompt_tokens, view)

    def remove_row(self, row: int) -> None:
        """Queues a removed row; processors are not notified of a request that no step contained."""
        if self._added.pop(row, None) is None:
            self._removed.append(row)

    def update(self) -> None:
        """Notifies the processors of the queued changes; rows that one fails at cannot be computed."""
        if not (self._removed or self._added):
            return
        removed, added = self._removed, list(self._added.values())
        self._removed, self._added = [], {}
        for row in (*removed, *(one.row for one in added)):
            self._failed.pop(row, None)
        for processor in self._all:
            try:
                processor.update_state(removed, added)
            except Exception:  # of one row, perhaps, which must not end the other rows
                logger.exception("%s failed at changed rows", type(processor).__name__)
                self._update_one_by_one(processor, removed, added)

    def _update_one_by_one(self, processor: LogitsProcessor, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        for row in removed:
            with contextlib.suppress(Exception):  # it may have been removed before the error
                processor.update_state([row], [])
        for one in added:
            try:
                processor.update_state([], [one])
            except Exception as error:  # noqa: BLE001 (raised again by the steps with that row)
                self._failed[one.row] = error

    def before_penalties(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Applies the processors that may change the most likely token.

        Raises:
            LogitsProcessorError: A processor has failed at one of these rows when it was added.
        """
        self._check(rows)
        return _apply(self._before, logits, rows)

    def after_temperature(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return _apply(self._after, logits, rows)

    def _check(self, rows: LogitsRows) -> None:
        for row in self._failed.keys() & set(rows.rows.tolist()) if self._failed else ():
            raise LogitsProcessorError(f"a logits processor failed at row {row}") from self._failed[row]

    @property
    def has_after_temperature(self) -> bool:
        """Whether any processor is applied after temperature."""
        return bool(self._after)


def load_logits_processors(names: Sequence[str]) -> list[LogitsProcessorType]:
    """Classes of installed packages (entry points, sorted by name), then the given ones, `module:Class`.

    Raises:
        LogitsProcessorError: A class cannot be imported or is not a logits processor.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    every = [*(entry.value for entry in installed), *names]
    if every:
        import_parts()
    return [_load(name) for name in every]


def _load(name: str) -> LogitsProcessorType:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise LogitsProcessorError(f"logits processor {name[:128]!r} must be given as module:Class")
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise LogitsProcessorError(f"logits processor {name[:128]!r} cannot be imported: {error}") from error
    processor_class = getattr(found, class_name, None)
    missing = [method for method in _METHODS if not callable(getattr(processor_class, method, None))]
    if missing:
        raise LogitsProcessorError(f"{name[:128]!r} is not a logits processor: it lacks {', '.join(missing)}")
    return cast("LogitsProcessorType", processor_class)


def _apply(processors: Sequence[LogitsProcessor], logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
    for processor in processors:
        changed = processor.apply(logits, rows)
        if changed.shape != logits.shape or changed.dtype != logits.dtype:
            raise LogitsProcessorError(
                f"{type(processor).__name__} returned {changed.dtype} {list(changed.shape)}"
                f" for logits of {logits.dtype} {list(logits.shape)}"
            )
        logits = changed
    return logits
