"""Resumable answers as a database keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import KeptAnswer, KeptRows, Written
from llmstack_server.state.stream_record import Head, StreamRecord

FILE_NAME: Final = "streams.sqlite3"
# What is older was given up: its client would have to wait this long for a server.
MAX_DOWNTIME_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A kept request, from which the same answer can be generated again.

    Attributes:
        headers: The headers of the request that its answer depends on.
        seed: The seed from which seeds that the body lacks are drawn.
        identity: What tokens and events follow from besides the request.
        num_resumes: How many servers have begun it again.
    """

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    seed: int
    identity: str
    num_resumes: int = 0


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One answer of an earlier server, with what is of use of its beginning.

    Attributes:
        written: What the database has of it.
    """

    id: str
    owner: str
    digest: str
    key: str | None
    keep_s: float
    request: KeptRequest
    head: Head | None
    is_over: bool
    source: AnswerSource
    parts: Sequence[bytes]
    written: Written
    written_at: float


def open_rows(folder: Path, secret: bytes) -> KeptRows:
    """The database of all API processes of a server; raises ServeError."""
    return KeptRows(folder / FILE_NAME, secret, is_shared=True)


def load_streams(rows: KeptRows, index: int, count: int) -> list[StreamRow]:
    """The answers of the process `index` of `count`; raises ServeError."""
    return [row for row in rows.load(decoded_stream) if int(row.id, 16) % count == index]


def encoded_stream(
    record: StreamRecord, request: KeptRequest, source: AnswerSource, *, ended_at: float | None,
    parts: Sequence[bytes],
) -> KeptAnswer:  # fmt: skip
    """An answer with its new parts, as the database keeps it."""
    head = None if record.head is None else _encoded_head(record.head)
    facts = {"digest": record.digest, "key": record.key, "keep_s": record.keep_s, "head": head}
    fields = asdict(request)
    body = fields.pop("body")
    return KeptAnswer(
        record.id, record.owner, facts | {"request": fields}, body, ended_at,
        parts=parts, source=source,
    )  # fmt: skip


def decoded_stream(answer: KeptAnswer) -> StreamRow:
    """The answer in the form of the server; raises TypeError, ValueError or KeyError."""
    facts = answer.facts
    request = dict(facts["request"])
    headers = tuple((str(name), str(value)) for name, value in request.pop("headers"))
    kept = KeptRequest(body=answer.data, headers=headers, **request)
    head = None if facts["head"] is None else _decoded_head(facts["head"])
    texts = (facts["digest"], facts["key"] or "", kept.path, kept.identity)
    numbers = (kept.seed, kept.num_resumes, facts["keep_s"])
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, int | float) for one in numbers):
        raise TypeError("a fact has another type")
    is_over = answer.ended_at is not None
    parts, source = answer.parts, answer.source or AnswerSource()
    written = Written(len(parts), source.num_bytes)
    if not is_over and (head is None or not head.is_stream):  # a part of a whole answer, which is generated again
        parts, source, written = (), AnswerSource(source.values), Written(-1)
    return StreamRow(
        answer.id, answer.owner, facts["digest"], facts["key"], facts["keep_s"], kept, head, is_over, source, parts,
        written, answer.written_at,
    )  # fmt: skip


def _encoded_head(head: Head) -> list[Any]:
    pairs = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
    return [head.status, pairs, head.is_stream]


def _decoded_head(found: Sequence[Any]) -> Head:
    status, pairs, is_stream = found
    headers = tuple((str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs)
    return Head(int(status), headers, bool(is_stream))
