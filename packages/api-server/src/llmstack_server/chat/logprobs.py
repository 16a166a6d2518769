"""Log-probabilities in OpenAI's two forms, and prompt log-probabilities in vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from llmstack_llm import Logprob
from llmstack_server.web.pauses import ITEMS_PER_STEP, collected
from llmstack_types.json_values import JSONObject

# JSON has no -inf; this is OpenAI's lowest value.
LOWEST = -9999.0

Position = Mapping[int, Logprob]
Lists = dict[str, list[object]]
"""The lists of a completion's `logprobs`, one entry for each token."""
_LISTS: Final = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class CompletionLogprobs:
    """Builds the `logprobs` objects of one choice of a completion; keeps the text offset between chunks.

    With `shows_ids`, tokens are `token_id:N` rather than their texts, which need not be unique. A negative `num_top`
    shows every token that the engine reports.
    """

    def __init__(self, num_top: int, *, shows_ids: bool = False) -> None:
        self._num_top = num_top
        self._shows_ids = shows_ids
        self._offset = 0

    def build(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
        prompt_texts: Sequence[str] = (),
        found: Lists | None = None,
    ) -> Lists:
        """Tokens, their log-probabilities, the most likely ones, and offsets, behind those that were `found` before.

        A position is None for a prompt's first token, which has none; its text is in `prompt_texts`.
        """
        found = {name: [] for name in _LISTS} if found is None else found
        offsets, token_logprobs, tokens, top_logprobs = (found[name] for name in _LISTS)
        for index, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            chosen = None if position is None else position.get(token_id)
            token = prompt_texts[index] if position is None else _text(chosen, token_id)
            tokens.append(token_name(token_id) if self._shows_ids else token)
            token_logprobs.append(None if chosen is None else floor(chosen.logprob))
            top_logprobs.append(None if position is None else self._top(position))
            offsets.append(self._offset)
            self._offset += len(token)
        return found

    async def build_whole(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
        prompt_texts: Sequence[str] = (),
        found: Lists | None = None,
    ) -> Lists:
        """The same, of a whole text at once; other requests run after every few of its tokens."""
        found = self.build((), (), (), found)
        for start in range(0, len(token_ids), ITEMS_PER_STEP):
            part = slice(start, start + ITEMS_PER_STEP)
            self.build(token_ids[part], positions[part], prompt_texts[part], found)
            await asyncio.sleep(0)
        return found

    def _top(self, position: Position) -> dict[str, float]:
        # The chosen token is first in `position`, so with `num_top` 0 it is the only entry.
        entries = position.items() if self._num_top < 0 else islice(position.items(), self._num_top + 1)
        return {
            token_name(token_id) if self._shows_ids else _text(entry, token_id): floor(entry.logprob)
            for token_id, entry in entries
        }


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position],
    num_top: int,
    *,
    shows_ids: bool = False,
) -> Iterator[JSONObject]:
    """The entries of a chat's `logprobs.content`; `num_top` and `shows_ids` as in `CompletionLogprobs`."""
    for token_id, position in zip(token_ids, positions, strict=True):
        yield _chat_entry(token_id, position, num_top, shows_ids)


def _chat_entry(token_id: int, position: Position, num_top: int, shows_ids: bool) -> JSONObject:
    best = sorted(position.items(), key=lambda item: -item[1].logprob)[: num_top if num_top >= 0 else None]
    entry = _chat_token(token_id, position[token_id], shows_ids)
    entry["top_logprobs"] = [_chat_token(other_id, other, shows_ids) for other_id, other in best]
    return entry


def _chat_token(token_id: int, entry: Logprob, shows_ids: bool) -> JSONObject:
    text = _text(entry, token_id)
    token = token_name(token_id) if shows_ids else text
    raw = text.encode() if entry.token_bytes is None else entry.token_bytes
    return {"token": token, "logprob": floor(entry.logprob), "bytes": list(raw)}


async def prompt_logprobs_object(positions: Sequence[Position | None] | None) -> list[JSONObject | None] | None:
    """vLLM's `prompt_logprobs`: a map from token id to its values per prompt token; the first is null."""
    if positions is None:
        return None
    return await collected(None if position is None else _prompt_entry(position) for position in positions)


def _prompt_entry(position: Position) -> JSONObject:
    return {
        str(token_id): {"logprob": floor(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in position.items()
    }


def floor(logprob: float) -> float:
    """The log-probability, finite for JSON."""
    return logprob if logprob > LOWEST else LOWEST


def _text(entry: Logprob | None, token_id: int) -> str:
    if entry is None or entry.decoded_token is None:
        return token_name(token_id)
    return entry.decoded_token


def token_name(token_id: int) -> str:
    """The name of a token by its id, where its text is unknown or not requested."""
    return f"token_id:{token_id}"
