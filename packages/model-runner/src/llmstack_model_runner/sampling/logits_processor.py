"""Custom logits processors: what one is, how it is found, and how it is told which requests come and go."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from llmstack_types import SamplingParams

ENTRY_POINT_GROUP = "llmstack.logits_processors"
_METHODS = ("is_argmax_invariant", "update_state", "apply")


class LogitsProcessorError(ValueError):
    """A logits processor cannot be loaded, or does not do what one does; the text names it."""


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A request that came, or came back after a preemption.

    Attributes:
        row: Its number for as long as it stays; those of requests that left are given to others.
        params: Its sampling parameters; `extra_args` holds what the user wrote for processors.
        num_prompt_tokens: The first of `token_ids`.
        token_ids: Its tokens, read-only. Grows under the processor's eyes: in each step the prompt and
            `LogitsRows.num_output_tokens` more are valid, what lies beyond is not. [max_num_tokens]
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """What the rows of one step's logits belong to; parallel arrays.

    Attributes:
        rows: `AddedRow.row` of each row of the logits; a request whose drafts are verified has several.
        num_output_tokens: Tokens that the request has generated before the one chosen here.
    """

    rows: npt.NDArray[np.int64]  # [num_logits]
    num_output_tokens: npt.NDArray[np.int64]  # [num_logits]


class LogitsProcessor(Protocol):
    """Changes the logits of some requests of each batch; one object per engine, called by one thread."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Makes room: row numbers lie below `max_num_rows`."""

    def is_argmax_invariant(self) -> bool:
        """True if the most likely token stays so. Asked once.

        Such a processor is called after temperature and for rows drawn at random only; another one before penalties and
        for all rows.
        """

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        """Rows that left, then rows that came; called between steps, if there were any."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """The new logits, which may be the old ones changed in place: float32 [num_logits, vocab_size]."""


class LogitsProcessorType(Protocol):
    """A class of processors."""

    def __call__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessor:
        """Constructs one."""


class LogitsProcessors:
    """The processors of one engine, and the arrivals and departures that they have not been told of."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._all = tuple(processors)
        is_invariant = [processor.is_argmax_invariant() for processor in processors]
        self._before = tuple(one for one, is_late in zip(processors, is_invariant, strict=True) if not is_late)
        self._after = tuple(one for one, is_late in zip(processors, is_invariant, strict=True) if is_late)
        self._removed: list[int] = []
        self._added: dict[int, AddedRow] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add_row(
        self, row: int, params: SamplingParams, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int
    ) -> None:
        """Notes an arrival; `token_ids` is the row's part of the batch's array."""
        view = token_ids.view()
        view.flags.writeable = False
        self._added[row] = AddedRow(row, params, num_prompt_tokens, view)

    def remove_row(self, row: int) -> None:
        """Notes a departure; a request that no step saw is not mentioned at all."""
        if self._added.pop(row, None) is None:
            self._removed.append(row)

    def update(self) -> None:
        """Tells the processors what was noted."""
        if not (self._removed or self._added):
            return
        removed, added = self._removed, list(self._added.values())
        self._removed, self._added = [], {}
        for processor in self._all:
            processor.update_state(removed, added)

    def before_penalties(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Applies those that may change the most likely token."""
        return _apply(self._before, logits, rows)

    def after_temperature(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Applies the others."""
        return _apply(self._after, logits, rows)

    @property
    def has_after_temperature(self) -> bool:
        """True if there are such."""
        return bool(self._after)


def load_logits_processors(names: Sequence[str]) -> list[LogitsProcessorType]:
    """The classes of installed packages (entry points of the group, by name), then those named `module:Class`.

    Raises:
        LogitsProcessorError: One cannot be imported, or is none.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    return [_load(name) for name in (*(entry.value for entry in installed), *names)]


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
