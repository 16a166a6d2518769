"""Places of media among the tokens of a prompt, and their expansion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmstack_llm import request_errors
from llmstack_llm.media.processor import MediaSymbols, OpenedMedia
from llmstack_types.vocabulary import MediaKind


class PlacedMedia(NamedTuple):
    """An item and its place among the tokens of a prompt.

    Attributes:
        offset: Its first token.
        num_tokens: From its first vector to its last.
        embed_runs: Which of them vectors replace, (start, length) from `offset` on.
    """

    opened: OpenedMedia
    kind: MediaKind
    offset: int
    num_tokens: int
    embed_runs: tuple[tuple[int, int], ...]

    @property
    def num_vectors(self) -> int:
        """Tokens that vectors replace."""
        return sum(length for _, length in self.embed_runs)


class _Run(NamedTuple):
    """A token of a text that stands for so many vectors of an item."""

    item: int
    token_id: int
    num_vectors: int


class ExpandedText(NamedTuple):
    """A text with each token of vectors once.

    Attributes:
        runs: What these tokens stand for, in the order of the text.
    """

    text: str
    runs: list[_Run]


def expand_symbols(
    text: str,
    items: Sequence[tuple[MediaKind, OpenedMedia]],
    symbols: Mapping[MediaKind, MediaSymbols],
    token_to_id: Mapping[str, int],
) -> ExpandedText:
    """The text with the pieces of each item in place of its symbol; items of one kind come in the text's order.

    `token_to_id`: The special tokens of the tokenizer.

    Raises:
        InvalidRequestError: The template shows more or fewer symbols than there are items.
    """
    kind_of = {symbols[kind].token: kind for kind in {kind for kind, _ in items}}
    left = {kind: [index for index, (one, _) in enumerate(items) if one == kind] for kind in kind_of.values()}
    parts: list[str] = []
    runs: list[_Run] = []
    position = 0
    for match in re.finditer("|".join(map(re.escape, sorted(kind_of, key=len, reverse=True))), text):
        waiting = left[kind_of[match.group()]]
        if not waiting:
            raise _wrong_count()
        index = waiting.pop(0)
        parts.append(text[position : match.start()])
        for piece, num_vectors in items[index][1].pieces:
            parts.append(piece)
            if num_vectors and piece not in token_to_id:
                raise request_errors.unsupported_value("messages", "the tokenizer has no special token for pictures")
            if num_vectors:
                runs.append(_Run(index, token_to_id[piece], num_vectors))
        position = match.end()
    if any(left.values()):
        raise _wrong_count()
    return ExpandedText("".join([*parts, text[position:]]), runs)


def expand_tokens(
    token_ids: Sequence[int], expanded: ExpandedText, items: Sequence[tuple[MediaKind, OpenedMedia]]
) -> tuple[list[int], list[PlacedMedia]]:
    """The token ids of the text with each token of vectors repeated, and where the items are.

    Raises:
        InvalidRequestError: The text has other tokens of vectors than those of the items.
    """
    names = {run.token_id for run in expanded.runs}
    places = [place for place, token_id in enumerate(token_ids) if token_id in names]
    if [token_ids[place] for place in places] != [run.token_id for run in expanded.runs]:
        raise _wrong_count()
    whole: list[int] = []
    spans: dict[int, list[tuple[int, int]]] = {}
    position = 0
    for place, run in zip(places, expanded.runs, strict=True):
        whole += token_ids[position:place]
        spans.setdefault(run.item, []).append((len(whole), run.num_vectors))
        whole += [run.token_id] * run.num_vectors
        position = place + 1
    whole += token_ids[position:]
    placed = [_placed(items[index], runs) for index, runs in spans.items()]
    return whole, sorted(placed, key=lambda one: one.offset)


def _placed(item: tuple[MediaKind, OpenedMedia], spans: Sequence[tuple[int, int]]) -> PlacedMedia:
    offset = spans[0][0]
    num_tokens = sum(spans[-1]) - offset
    is_whole = len(spans) == 1
    runs = ((0, num_tokens),) if is_whole else tuple((start - offset, length) for start, length in spans)
    return PlacedMedia(item[1], item[0], offset, num_tokens, runs)


def _wrong_count() -> Exception:
    return request_errors.invalid_value("messages", "the chat template does not show each picture once")
