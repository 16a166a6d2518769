"""Segments of a transcript, and how a model's tokens say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmstack_llm.speech.words import Word
from llmstack_model_files import SpeechTokens


@dataclass(frozen=True, slots=True)
class Segment:
    """The words between two times of a file.

    Attributes:
        start_s: Seconds from the beginning of the file.
        seek_s: Where the window began in which it is.
        text: With the blank before it, so that the text of a file is all of these in order.
        token_ids: Those of the text.
        logprobs: Of these tokens, one by one, with what the engine reports of each.
        temperature: At which it was sampled.
        avg_logprob: Mean log-probability of the tokens of its window.
        compression_ratio: Bytes of the window's text divided by those that it compresses to.
        no_speech_prob: Probability that nothing is said in the window; None where it was not asked for.
        words: Its words, with times in seconds from the beginning of the file; empty where they were not asked for.
    """

    start_s: float
    end_s: float
    seek_s: float
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[object, ...] = field(repr=False)
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None
    words: tuple[Word, ...] = ()


def with_words(segments: Sequence[Segment], words: Sequence[Word]) -> list[Segment]:
    """The segments of a window with its words, whose times are those of the window. Both are in order."""
    found, rest, num_tokens = list[Segment](), list(reversed(words)), 0
    place = 0  # of the next word's first token, among all tokens of text
    for segment in segments:
        num_tokens += len(segment.token_ids)
        own: list[Word] = []
        while rest and place < num_tokens:
            word = rest.pop()
            place += len(word.token_ids)
            own.append(word._replace(start_s=word.start_s + segment.seek_s, end_s=word.end_s + segment.seek_s))
        found.append(replace(segment, words=tuple(own)))
    return found


class Passage(NamedTuple):
    """Tokens of text between two timestamps, in steps; `end` is None where no timestamp follows.

    Attributes:
        places: Of its tokens in the answer.
    """

    start: int
    end: int | None
    places: tuple[int, ...]
    token_ids: tuple[int, ...]


def read_passages(token_ids: Sequence[int], tokens: SpeechTokens) -> list[Passage]:
    """The passages of an answer; tokens that are neither text nor times are left out."""
    found: list[Passage] = []
    start, places = 0, list[int]()
    for index, token in enumerate(token_ids):
        if token >= tokens.first_timestamp:
            step = token - tokens.first_timestamp
            if places:
                found.append(_passage(start, step, places, token_ids))
            start, places = step, []
        elif token < tokens.end:
            places.append(index)
    if places:
        found.append(_passage(start, None, places, token_ids))
    return found


def _passage(start: int, end: int | None, places: list[int], token_ids: Sequence[int]) -> Passage:
    return Passage(start, end, tuple(places), tuple(token_ids[place] for place in places))
