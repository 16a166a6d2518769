"""Rules of a decoder of speech: its first tokens, and timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from llmstack_model_files import SpeechTokens
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling.logits_processor import AddedRow, LogitsRows


class _Begin(NamedTuple):
    """The beginning of a row's tokens.

    Attributes:
        place: Of the first token of the answer.
        has_timestamps: Whether the answer has any.
        needs: Tokens of which the next one must be one; None where the beginning is complete.
    """

    place: int
    has_timestamps: bool
    needs: Sequence[int] | None = None


class SpeechRules:
    """A logits processor that lets a model of speech generate what it was trained to.

    An answer begins behind the start token, and of a multilingual model behind a language and a task. Where these are
    not given, the language is the most likely one, and the task is to transcribe. Then come timestamps and text, unless
    `no_timestamps` precedes them. Timestamps do not decrease, and come in pairs, of an end and a start, but at the
    beginning and at the end. One is generated where all together are more likely than any token of text.

    A row's rules follow from its tokens alone, so that nothing has to be undone.
    """

    def __init__(self, tokens: SpeechTokens, max_num_rows: int) -> None:
        self._tokens = tokens
        self._rows: list[AddedRow | None] = [None] * max_num_rows
        self._starts = [0] * max_num_rows  # the place behind the start token
        self._languages = sorted(tokens.languages.values())
        self._tasks = frozenset(tokens.tasks.values())
        self._suppressed = np.array(sorted({*tokens.suppressed, tokens.no_timestamps}), dtype=np.int64)
        self._first_suppressed = np.array(sorted({*tokens.begin_suppressed}), dtype=np.int64)

    def is_argmax_invariant(self) -> bool:
        """No: it masks tokens."""
        return False

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        """Notes where the beginning of each new row is."""
        for row in removed:
            self._rows[row] = None
        for one in added:
            prompt = one.token_ids[: one.num_prompt_tokens]
            found = np.flatnonzero(prompt == self._tokens.start)
            self._rows[one.row] = one
            self._starts[one.row] = int(found[-1]) + 1 if len(found) else 0

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Masks logits of each row in place."""
        masked = logits.cpu().numpy()  # the same memory on a CPU
        for values, row, num_output_tokens in zip(
            masked, rows.rows.tolist(), rows.num_output_tokens.tolist(), strict=True
        ):
            known = self._rows[row]
            if known is not None:
                end = known.num_prompt_tokens + num_output_tokens
                self._mask(values, self._starts[row], known.num_prompt_tokens, known.token_ids[:end])
        return logits if logits.device.type == "cpu" else torch.from_numpy(masked).to(logits.device)

    def _mask(self, values: np.ndarray, start: int, num_prompt_tokens: int, token_ids: IntArray) -> None:
        begin = self._begin(start, num_prompt_tokens, token_ids)
        if begin.needs is not None:
            kept = values[begin.needs]
            values[:] = -np.inf
            values[begin.needs] = kept
            return
        values[self._suppressed] = -np.inf
        answer = token_ids[begin.place :]
        if not len(answer):
            values[self._first_suppressed] = -np.inf
        if begin.has_timestamps:
            self._mask_timestamps(values, answer)

    def _begin(self, start: int, num_prompt_tokens: int, token_ids: IntArray) -> _Begin:
        """The settings by the tokens behind the start token; without one, the prompt is all of the beginning."""
        if not start:
            return _Begin(num_prompt_tokens, False)
        place, end = start, len(token_ids)
        if self._languages:
            if place == end:
                return _Begin(place, False, self._languages)
            if int(token_ids[place]) in self._languages:
                place += 1
                if place == end:
                    return _Begin(place, False, [self._tokens.tasks["transcribe"]])
            if int(token_ids[place]) in self._tasks:
                place += 1
        is_plain = place < num_prompt_tokens and int(token_ids[place]) == self._tokens.no_timestamps
        return _Begin(place + is_plain, not is_plain)

    def _mask_timestamps(self, values: np.ndarray, answer: IntArray) -> None:
        first = self._tokens.first_timestamp
        if not len(answer):
            values[:first] = -np.inf
            if self._tokens.max_initial_timestamp is not None:
                values[first + self._tokens.max_initial_timestamp + 1 :] = -np.inf
            return
        is_behind_one = answer[-1] >= first
        is_behind_two = is_behind_one and (len(answer) < 2 or answer[-2] >= first)
        if is_behind_two:
            values[first:] = -np.inf
        elif is_behind_one:
            values[: self._tokens.end] = -np.inf
        times = answer[answer >= first]
        if len(times):  # the same time again begins where a segment has just ended
            values[first : int(times[-1]) + (not is_behind_one or is_behind_two)] = -np.inf
        if _log_sum(values[first:]) > values[:first].max():
            values[:first] = -np.inf


def _log_sum(values: np.ndarray) -> float:
    """The logarithm of the sum of the exponentials."""
    largest = float(values.max())
    if not np.isfinite(largest):
        return largest
    return largest + float(np.log(np.exp(values - largest).sum()))
