"""Tokens that would repeat a sequence among the last ones, as DeepSeek-OCR asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.sampling.logits_processor import AddedRow, LogitsRows
from llmstack_model_runner.sampling.repeated_ngrams import after_repeated_ngrams

_WINDOW = 100
_MAX_WINDOW = 1 << 16


class _Row(NamedTuple):
    """The limits of one request; `tokens` are its tokens, of which `num_prompt` are its prompt."""

    size: int
    window: int
    allowed: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    num_prompt: int


class WindowNgrams:
    """A `LogitsProcessor`, the one that vLLM calls `NGramPerReqLogitsProcessor`.

    `extra_args` of a request are `ngram_size`, without which nothing is done, `window_size` and `whitelist_token_ids`.
    A token is impossible where it would be the last of so many generated tokens that begin among the last
    `window_size` generated ones already, unless it is on the list.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows: dict[int, _Row] = {}
        self._device = device

    def is_argmax_invariant(self) -> bool:
        """False: the rule may forbid the likeliest token."""
        return False

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        """Reads the arguments of new rows; ValueError if they are none."""
        for row in removed:
            self._rows.pop(row, None)
        for one in added:
            self._rows.pop(one.row, None)
            arguments = one.params.extra_args or {}
            if arguments.get("ngram_size") is not None:
                size, window = _number(arguments, "ngram_size", None), _number(arguments, "window_size", _WINDOW)
                self._rows[one.row] = _Row(size, window, _allowed(arguments), one.token_ids, one.num_prompt_tokens)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Takes O(window) per row that asks."""
        if not self._rows:
            return logits
        for place, row in enumerate(rows.rows.tolist()):
            asked = self._rows.get(row)
            if asked is not None and len(banned := _banned(asked, int(rows.num_output_tokens[place]))):
                logits[place, torch.from_numpy(banned).to(self._device)] = float("-inf")
        return logits


def _banned(asked: _Row, num_outputs: int) -> npt.NDArray[np.int64]:
    """Tokens that followed the last `size - 1` ones within the window."""
    outputs = asked.tokens[asked.num_prompt : asked.num_prompt + num_outputs]
    recent = outputs[max(0, len(outputs) - asked.window) :]
    following = after_repeated_ngrams(recent, asked.size)
    return np.setdiff1d(following, asked.allowed)


def _allowed(arguments: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    found = arguments.get("whitelist_token_ids")
    found = [] if found is None else found
    if not isinstance(found, list | tuple) or not all(type(token_id) is int for token_id in found):
        raise ValueError(f"whitelist_token_ids must be an array of token ids, got {str(found)[:64]}")
    return np.array(found, dtype=np.int64)


def _number(arguments: Mapping[str, Any], name: str, default: int | None) -> int:
    found = arguments.get(name)
    found = default if found is None else found
    if type(found) is not int or not 0 < found <= _MAX_WINDOW:
        raise ValueError(f"{name} must be an integer from 1 to {_MAX_WINDOW}, got {str(found)[:64]}")
    return found
