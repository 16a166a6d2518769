"""Packs documents into rows of token ids with targets, a fresh arrangement of the whole text for every epoch."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer

from storyteller_training.bpe import SPECIAL_TOKENS
from storyteller_training.conversations import Turn, conversations_of, noun_frequencies, opening_conversations
from storyteller_training.corpus import Section
from storyteller_training.persona import small_talk

IGNORED = -100
EMPHASIZED = 1 << 20
"""Added to the targets that count more than others in the loss: the tokens of a subject that was asked for."""
NUM_SMALL_TALKS = 1000
Row = tuple[list[int], list[int]]


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token."""
    index = tokenizer.token_to_id(token)
    if index is None:
        raise KeyError(token)
    return int(index)


class DocumentEncoder:
    """Turns documents into token ids and targets; what the user says is never a target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_id, self._user, self._storyteller = (special_id(tokenizer, t) for t in SPECIAL_TOKENS)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def conversation(self, turns: Iterable[Turn]) -> Row:
        """Return ids and targets (aligned with the ids, not yet shifted) of a conversation."""
        ids: list[int] = []
        targets: list[int] = []
        for turn in turns:
            asked = [self._user, *self.encode(turn.request or ""), self._storyteller]
            answered = [*self.encode(turn.answer), self.end_id]
            ids += asked + answered
            targets += [IGNORED] * len(asked) + (self._emphasized(turn) if turn.subjects else answered)
        return ids, targets

    def _emphasized(self, turn: Turn) -> list[int]:
        """Return the targets of an answer, with an emphasis on its subjects."""
        encoding = self._tokenizer.encode(turn.answer, add_special_tokens=False)
        names = "|".join(map(re.escape, turn.subjects))
        spans = [match.span() for match in re.finditer(rf"(?<!\w)({names})(?!\w)", turn.answer, re.IGNORECASE)]
        targets = list(encoding.ids)
        for index, (start, end) in enumerate(encoding.offsets):
            if any(start < stop and begin < end for begin, stop in spans):
                targets[index] += EMPHASIZED
        return [*targets, self.end_id]


def epoch_rows(sections: list[Section], encoder: DocumentEncoder, length: int, seed: int) -> list[Row]:
    """Return the shuffled rows of one epoch: every passage once as running text and once as an answer."""
    rng = random.Random(seed)
    frequencies = noun_frequencies(sections)
    talks = [conversation for section in sections for conversation in conversations_of(section, frequencies, rng)]
    talks += opening_conversations(sections, frequencies, rng)
    talks += [[Turn(*small_talk(rng))] for _ in range(NUM_SMALL_TALKS)]
    documents = [encoder.conversation(turns) for turns in talks]
    documents += paragraph_runs(sections, encoder, length, rng)
    rng.shuffle(documents)
    return pack(documents, length + 1)


def paragraph_runs(sections: list[Section], encoder: DocumentEncoder, length: int, rng: random.Random) -> list[Row]:
    """Return running text cut at paragraph ends into runs of about `length` tokens; only a tale's last run ends."""
    runs: list[Row] = []
    for section in sections:
        encoded = [encoder.encode(("\n\n" if i else "") + text) for i, text in enumerate(section.paragraphs)]
        current: list[int] = []
        target = rng.randint(length // 4, length)
        for index, ids in enumerate(encoded):
            if len(current) > target:
                runs.append((current, current))
                current, target = [], length
                ids = encoder.encode(section.paragraphs[index])
            current = current + ids
        ended = [*current, encoder.end_id]
        runs.append((ended, ended))
    return runs


def pack(documents: list[Row], length: int) -> list[Row]:
    """Fill rows of exactly `length` ids with whole documents; the one that crosses a row's end is cut there."""
    rows: list[Row] = []
    ids: list[int] = []
    targets: list[int] = []
    for document_ids, document_targets in documents:
        ids = ids + document_ids
        targets = targets + document_targets
        if len(ids) >= length:
            rows.append((ids[:length], targets[:length]))
            ids, targets = [], []
    return rows


def as_tensors(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-token targets, each [num_rows, length]."""
    ids = torch.tensor([row[0] for row in rows])
    targets = torch.tensor([row[1] for row in rows])
    return ids[:, :-1], targets[:, 1:]


def validation_rows(sections: list[Section], encoder: DocumentEncoder, length: int) -> list[Row]:
    """Return the held-out text as rows: running text and conversations, the same on every call."""
    rng = random.Random(0)
    runs = paragraph_runs(sections, encoder, length, rng)
    frequencies = noun_frequencies(sections)
    talks = [
        encoder.conversation(turns) for section in sections for turns in conversations_of(section, frequencies, rng)
    ]
    return pack(runs, length + 1) + pack(talks, length + 1)
