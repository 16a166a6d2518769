"""Ends of a gap: llama.cpp's sampler `infill`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_files.token_bytes import TokenBytes, read_token_bytes
from llmstack_types import EngineStartError, ModelRunnerConfig, SamplingParams

_LEAST_OF_TEXT: Final = 0.2
"""A text below this probability is dropped, whatever the others have."""


class TokenTexts:
    """The bytes of tokens, from a tokenizer's file: read by `read`, or when the first token is asked for."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: That of the tokenizer; empty where there is none."""
        self._folder = folder

    @cached_property
    def _table(self) -> tuple[TokenBytes, frozenset[int]]:
        if not self._folder:
            raise EngineStartError("the sampler 'infill' needs a tokenizer")
        return read_token_bytes(Path(self._folder))

    def read(self) -> None:
        """Reads the file, unless it is in memory; in any thread.

        Raises:
            EngineStartError: There is no tokenizer.
            ModelFilesError: It cannot be read, or tells no bytes.
        """
        self.text_of(0)

    def text_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none of a special token."""
        table, special = self._table
        return b"" if token_id in special else table.get(token_id) or b""


class SamplingByTexts:
    """A runner that samples by the texts of tokens. They outlive its weights and its KV storage."""

    _config: ModelRunnerConfig

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of the tokens of the model's tokenizer."""
        return TokenTexts(self._config.tokenizer_path)

    def announce_token_texts(self) -> None:
        """Nothing is to be prepared before `read_token_texts`."""

    def read_token_texts(self) -> None:
        """Reads them beside steps, in any thread; see `TokenTexts.read`."""
        self.token_texts.read()

    def hold_token_texts(self) -> None:
        """Does nothing: the texts are in memory already, and there is no other rank."""


@dataclass(frozen=True, slots=True)
class InfillRule:
    """The tokens that end one request, and the texts of all others, for `infill_mask`."""

    ending_token_ids: frozenset[int]
    texts: TokenTexts

    @staticmethod
    def of(params: SamplingParams, eos_token_ids: Collection[int], texts: TokenTexts) -> InfillRule | None:
        """The rule of a request; None of one without this sampler."""
        if not params.infill:
            return None
        return InfillRule(frozenset((*eos_token_ids, *(params.stop_token_ids or ()))), texts)


def infill_mask(
    token_ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, rules: Sequence[InfillRule]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that `infill` keeps: bool, like `logits`; and whether a row has one token alone: bool [num_rows].

    It chooses between an end and a text. See `kept_tokens`; a row's mask does not depend on other rows.

    Args:
        token_ids: The best tokens of each row. [num_rows, num_best]
        weights: Their unnormalised probabilities; 0 is no candidate. float32 [num_rows, num_best]
        logits: Minus infinity is a token that may not come. float32 [num_rows, vocab_size]
        rules: Those of the rows.
    """
    mask = torch.zeros_like(logits, dtype=torch.bool)
    is_single = torch.zeros(len(rules), dtype=torch.bool)
    best, all_masses = token_ids.cpu().numpy(), weights.cpu().numpy()
    for row, rule in enumerate(rules):
        is_candidate = all_masses[row] > 0.0
        candidates, masses = best[row][is_candidate], all_masses[row][is_candidate].astype(np.float64)
        kept = kept_tokens(candidates, masses / masses.sum(), rule) or [_end(logits[row], candidates, masses, rule)]
        mask[row, kept] = True
        is_single[row] = len(kept) == 1
    return mask, is_single.to(logits.device)


def kept_tokens(
    token_ids: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64], rule: InfillRule
) -> list[int]:
    """The candidates that are kept; empty if the text ends, though no candidate is an end.

    As in llama.cpp: with n candidates, of which the ends have the probability e and the texts t, only ends stay if
    3 e n > t. Else a text that begins another one is counted with it, under the likelier of the two. Texts below 0.2
    go, and of m texts that are left those below 1 / (m + 1), ends counted. O(n log n), and the pairs of texts of which
    one begins the other.

    Args:
        token_ids: Distinct. [n]
        probabilities: They add up to 1. [n]
        rule: That of the row.
    """
    order = np.lexsort((token_ids, -probabilities))
    candidates: list[int] = token_ids[order].tolist()
    chances = dict(zip(candidates, probabilities[order].tolist(), strict=True))
    ends = [one for one in candidates if one in rule.ending_token_ids]
    end_mass = sum(chances[one] for one in ends)
    text_mass = sum(chances[one] for one in candidates if one not in rule.ending_token_ids)
    if 3 * end_mass * len(candidates) > text_mass:
        return ends
    merged = _merged(candidates, chances, {one: rule.texts.text_of(one) for one in candidates})
    texts = [one for one in candidates if one not in rule.ending_token_ids and merged[one] >= _LEAST_OF_TEXT]
    if not texts:
        return []
    least = (sum(merged[one] for one in texts) + sum(merged[one] for one in ends)) / (len(texts) + 1)
    return [*(one for one in ends if merged[one]), *(one for one in texts if merged[one] >= least)]


def _merged(
    candidates: Sequence[int], chances: Mapping[int, float], token_id_to_text: Mapping[int, bytes]
) -> dict[int, float]:
    """The chances after each pair of a text and one that it begins, likeliest first; 0 of what is counted elsewhere."""
    merged = dict(chances)
    place = {one: index for index, one in enumerate(candidates)}
    by_text = sorted((text, place[one]) for one, text in token_id_to_text.items() if text)
    gone: set[int] = set()
    for first in candidates:
        text = token_id_to_text[first]
        if not text or first in gone:
            continue
        for second in (candidates[index] for index in _begun_by(text, by_text)):
            if first in gone:
                break
            if second == first or second in gone:
                continue
            kept, other = (second, first) if merged[second] > merged[first] else (first, second)
            merged[kept] += merged[other]
            merged[other] = 0.0
            gone.add(other)
    return merged


def _begun_by(text: bytes, by_text: Sequence[tuple[bytes, int]]) -> list[int]:
    """Places of the texts that begin with `text`, itself among them, in order."""
    found = []
    for other, place in by_text[bisect_left(by_text, (text, -1)) :]:
        if not other.startswith(text):
            break
        found.append(place)
    return sorted(found)


def _end(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], masses: npt.NDArray[np.float64], rule: InfillRule
) -> int:
    """The likeliest end that may come; where none may, the likeliest candidate."""
    known = torch.tensor(sorted(one for one in rule.ending_token_ids if 0 <= one < len(logits)), dtype=torch.int64)
    if len(known):
        found = logits[known.to(logits.device)]
        if found.max() > -torch.inf:
            return int(known[int(found.argmax())])
    return int(token_ids[int(masses.argmax())])
