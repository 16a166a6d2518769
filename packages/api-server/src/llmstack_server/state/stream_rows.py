"""Resumable answers as a database keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import KeptAnswer, KeptRequest, KeptRows, Written
from llmstack_server.state.stream_record import Head, StreamRecord
from llmstack_types.json_values import JSONObject

FILE_NAME: Final = "streams.sqlite3"
# What is older was given up: its client would have to wait this long for a server.
MAX_DOWNTIME_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One answer of an earlier server.

    Attributes:
        answer: The answer; its `num_parts` are those that readers may have.
        request, source: Those of the answer.
        written: What the database has of it.
    """

    answer: KeptAnswer
    request: KeptRequest
    source: AnswerSource
    head: Head | None
    written: Written

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.answer.ended_at is not None


def open_rows(folder: Path, secret: bytes, index: int, count: int) -> KeptRows:
    """The database of all `count` API processes of a server, for the process `index`; raises ServeError."""
    return KeptRows(folder / FILE_NAME, secret, is_shared=True, process=index, num_processes=count)


def load_streams(rows: KeptRows, index: int, count: int) -> list[StreamRow]:
    """The answers of the process `index` of `count`; raises ServeError."""
    return [row for row in rows.load(decoded_stream) if int(row.answer.id, 16) % count == index]


def facts_of(record: StreamRecord) -> JSONObject:
    """The facts of an answer in the database, besides its request and its parts."""
    head = None if record.head is None else _encoded_head(record.head)
    return {"digest": record.digest, "key": record.key, "keep_s": record.keep_s, "head": head}


def decoded_stream(answer: KeptAnswer) -> StreamRow:
    """The answer in the form of the server; raises TypeError, ValueError or KeyError."""
    facts, request = answer.facts, answer.request
    head = None if facts["head"] is None else _decoded_head(facts["head"])
    texts = (facts["digest"], facts["key"] or "")
    is_typed = isinstance(facts["keep_s"], int | float) and all(isinstance(text, str) for text in texts)
    if request is None or not is_typed:
        raise TypeError("a fact has another type")
    is_over = answer.ended_at is not None
    source = answer.source or AnswerSource()
    written = Written(answer.num_parts, source.num_bytes, len(answer.parts), len(source.values))
    if not is_over and (head is None or not head.is_stream):  # a whole answer, which is generated again
        answer.num_parts, source, written = 0, AnswerSource(), Written(-1)
    return StreamRow(answer, request, source, head, written)


def _encoded_head(head: Head) -> list[object]:
    pairs = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
    return [head.status, pairs, head.is_stream]


def _decoded_head(found: Sequence[Any]) -> Head:
    status, pairs, is_stream = found
    headers = tuple((str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs)
    return Head(int(status), headers, bool(is_stream))
