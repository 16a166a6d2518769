"""Kept answers in a database: rows in and out, without threads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.database import Schema, open_database, present, transaction
from llmstack_server.state.packed_parts import packed, unpacked
from llmstack_server.state.state_folder import DatabaseReplacedError
from llmstack_types.json_values import JSONObject

SCHEMA: Final = Schema(
    application_id=0x6C6C6D73,  # "llms"
    version=8,
    statements=(
        # `ended_at` is null while an answer is generated. `facts` is JSON. `body` is that of the request, until then.
        """CREATE TABLE answers (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, ended_at REAL, written_at REAL NOT NULL, facts TEXT NOT NULL,
            body BLOB NOT NULL, data BLOB NOT NULL
        )""",
        """CREATE TABLE pieces (
            answer TEXT NOT NULL, kind INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (answer, kind, number)
        ) WITHOUT ROWID""",
        # What is new of all answers in one write, as entries in MessagePack, until it becomes pieces.
        "CREATE TABLE log (number INTEGER PRIMARY KEY, process INTEGER NOT NULL, data BLOB NOT NULL)",
    ),
    upgrades=(
        (  # before 8 parts were not compressed, and those of ended streams had a form that is not read any more
            "DELETE FROM answers WHERE ended_at IS NOT NULL AND json_extract(facts, '$.digest') IS NOT NULL",
            "DELETE FROM pieces WHERE answer NOT IN (SELECT id FROM answers)",
        ),
    ),
)
# Kinds of pieces. One of PARTS has packed parts from `number` on. One of CUTS has those of the parts before `number`
# that no earlier one has.
PARTS, INPUTS, OUTPUTS, CUTS = range(4)
# The first byte of packed parts. A list in MessagePack begins with another one.
_COMPRESSED: Final = b"x"
# The row of an answer whose facts are as before is written only so often: a whole row costs more than a part.
MIN_ROW_INTERVAL_S: Final = 10.0
# The log becomes pieces after so much time or size, at the next write.
MAX_LOG_AGE_S: Final = 10.0
MAX_LOG_BYTES: Final = 1 << 20
# About what an answer takes.
_PROBE, _PROBE_BYTES = "probe", 16 << 10
_DRAWN, _REQUEST = "drawn", "request"

Read = TypeVar("Read")
_Piece = tuple[str, int, int, bytes]


class Entry(NamedTuple):
    """The new part of one answer that is generated.

    Attributes:
        num_parts: All its parts so far.
        cuts: Those of its source that are new.
    """

    answer_id: str
    num_parts: int
    cuts: bytes


@dataclass(slots=True)
class Written:
    """The part of one answer that is in the database.

    Attributes:
        num_parts: The parts whose cuts are in it; -1 where all is to be replaced.
        num_cut_bytes: The bytes of its cuts.
        num_kept_parts: The parts that are in it themselves.
        num_values: The values of its source.
        stage: What its row follows from, besides these and the time.
        at: When its row was written.
    """

    num_parts: int = 0
    num_cut_bytes: int = 0
    num_kept_parts: int = 0
    num_values: int = 0
    stage: tuple[object, ...] = ()
    at: float = 0.0


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

    def begun_again(self) -> Self:
        """The request with one server more that has begun it again."""
        return replace(self, num_resumes=self.num_resumes + 1)

    def facts(self) -> dict[str, object]:
        """All but the body, as JSON."""
        return {name: getattr(self, name) for name in ("path", "headers", "seed", "identity", "num_resumes")}


@dataclass(slots=True)
class KeptAnswer:
    """One answer as the database has it.

    Attributes:
        facts: What is known of it, as JSON.
        data: The answer as it began, and the whole answer at its end.
        ended_at: When it ended, by the clock of the world; None while it is generated.
        written_at: When its row was written last, `MIN_ROW_INTERVAL_S` before its last part at most.
        num_parts: The parts so far, which follow from its source, or are kept.
        parts: Those that are kept; of one that is written, those that are new.
        inputs, outputs: Further pieces, written with the row and at the end.
        request, source: What it is generated and encoded from until its end; of one that has ended the body is empty.
    """

    id: str
    owner: str
    facts: JSONObject = field(default_factory=dict)
    data: bytes = b""
    ended_at: float | None = None
    written_at: float = 0.0
    num_parts: int = 0
    parts: Sequence[bytes] = ()
    inputs: Sequence[bytes] = ()
    outputs: Sequence[bytes] = ()
    request: KeptRequest | None = None
    source: AnswerSource | None = None


class Change:
    """A change of the rows of one answer.

    Attributes:
        answer: The answer with its new parts; None where its rows are to be deleted.
        entry: Its new cuts, which wait for a part; None without new parts, and at its end.
        first: The number of the first of the parts that are kept.
        is_new, replaces: Whether all of it is written, and whether rows of it may be there before.
        has_row: Whether its own row is written.
        written: What is in the database afterwards; None where nothing is.
        num_bytes: About how much is written.
    """

    def __init__(
        self, answer_id: str, answer: KeptAnswer | None = None, before: Written | None = None, now: float = 0.0
    ) -> None:
        """`before`: What is in the database; None where the answer has no rows yet."""
        self.id = answer_id
        self.answer = answer
        is_new = self.is_new = before is None or before.num_parts < 0
        self.replaces = is_new and before is not None
        self.entry: Entry | None = None
        self.has_row = True
        self.written: Written | None = None
        self.first = self.num_bytes = 0
        if answer is None:
            return
        known = Written() if before is None or is_new else before
        num_parts, num_cut_bytes, self.first, at = known.num_parts, known.num_cut_bytes, known.num_kept_parts, known.at
        source, request, parts = answer.source, answer.request, answer.parts
        if answer.num_parts > num_parts:
            num_parts = answer.num_parts
            if answer.ended_at is None and source is not None:
                self.entry = Entry(answer_id, num_parts, source.cuts_after(num_cut_bytes))
                num_cut_bytes = source.num_bytes
        num_values = 0 if source is None else len(source.values)
        stage = answer.facts, request and request.num_resumes, answer.ended_at
        is_other = (stage, num_values) != (known.stage, known.num_values)
        self.has_row = is_new or now - at >= MIN_ROW_INTERVAL_S or is_other
        if self.has_row:
            at = now
            self.num_bytes = len(answer.data) + sum(map(len, (*answer.inputs, *answer.outputs)))
        self.num_bytes += sum(map(len, parts))
        self.written = Written(num_parts, num_cut_bytes, self.first + len(parts), num_values, stage, at)

    def pieces(self) -> Iterator[_Piece]:
        """Parts, inputs and outputs to write."""
        answer = self.answer
        if answer is None:
            return
        if answer.parts:
            yield self.id, PARTS, self.first, packed(answer.parts)
        if self.has_row:
            for kind, some in ((INPUTS, answer.inputs if self.is_new else ()), (OUTPUTS, answer.outputs)):
                yield from ((self.id, kind, number, data) for number, data in enumerate(some))


class KeptRows:
    """The rows of one database; used by one thread at a time."""

    def __init__(
        self, path: Path, secret: bytes = b"", *, is_shared: bool = False, process: int = 0, num_processes: int = 1
    ) -> None:
        """Opens the database, or makes it. What the earlier process of this number has logged becomes pieces.

        `is_shared`: Whether other processes have it open, too: `num_processes` of them, of which this is `process`.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self._name = f"--state-dir {path.parent}: the file {path.name}"
        self._process = process
        self._logged: set[str] = set()
        self._num_log_bytes = 0
        self._settled_at = 0.0
        self._connection = open_database(path, SCHEMA, is_shared=is_shared, secret=secret)
        try:
            with transaction(self._connection):
                self._settle("process = ? OR process >= ?", process, num_processes)
        except (sqlite3.Error, TypeError, ValueError) as error:
            self._connection.close()
            raise self._damaged(error) from None

    def close(self) -> None:
        """Closes the file, and empties its log."""
        self._connection.close()

    def load(self, read: Callable[[KeptAnswer], Read]) -> list[Read]:
        """All answers, decoded by `read`, in the order of their ends; unfinished ones last.

        Raises:
            ServeError: A row is not as this program writes it.
        """
        try:
            return [read(answer) for answer in self._load()]
        except (sqlite3.Error, TypeError, ValueError, KeyError, AttributeError) as error:
            raise self._damaged(error) from None

    def adopt(self, path: Path) -> None:
        """Moves the rows of another database into this one: those of a process of an earlier server.

        Raises:
            ServeError: The file cannot be used.
        """
        KeptRows(path).close()  # checks it, and leaves nothing in logs
        self._connection.execute("ATTACH DATABASE ? AS other", (str(path),))
        try:
            with transaction(self._connection):
                for table in ("answers", "pieces"):
                    # The names are constants of this module.
                    self._connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM other.{table}")  # noqa: S608
        except sqlite3.Error as error:
            raise ServeError(f"the rows of {path} cannot be moved: {error}") from None
        finally:
            self._connection.execute("DETACH DATABASE other")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)

    def write(self, changes: Sequence[Change], now: float) -> None:
        """Writes all changes or none.

        Raises:
            sqlite3.Error, OSError: The disk is full, or the file cannot be written.
            DatabaseReplacedError: Another file came in place of the one that had all rows.
        """
        before, self._connection = self._connection, present(self._connection)
        if self._connection is not before:
            raise DatabaseReplacedError
        entries = [change.entry for change in changes if change.entry is not None]
        rows = [change for change in changes if change.has_row]
        pieces = [piece for change in changes for piece in change.pieces()]
        is_due = now - self._settled_at >= MAX_LOG_AGE_S or self._num_log_bytes > MAX_LOG_BYTES
        # An answer that begins again, or goes, must have nothing in the log.
        is_due = is_due or any(change.id in self._logged for change in changes if change.is_new or not change.answer)
        data = msgpack.packb(entries) if entries else b""
        with transaction(self._connection) if rows or pieces or is_due else nullcontext():  # one statement is one, too
            if is_due:
                self._settle("process = ?", self._process)
            for change in rows:
                self._write(change, now)
            self._write_pieces(pieces)
            if data:
                self._connection.execute("INSERT INTO log (process, data) VALUES (?, ?)", (self._process, data))
        if is_due:
            self._logged.clear()
            self._num_log_bytes, self._settled_at = 0, now
        self._logged.update(entry.answer_id for entry in entries)
        self._num_log_bytes += len(data)

    def probe(self, now: float) -> None:
        """Writes and removes some bytes; raises as `write`."""
        self.write([Change(_PROBE, KeptAnswer(_PROBE, "", data=bytes(_PROBE_BYTES)))], now)
        self.write([Change(_PROBE)], now)

    def _write(self, change: Change, now: float) -> None:
        execute, answer = self._connection.execute, change.answer
        if answer is None or change.replaces:
            execute("DELETE FROM answers WHERE id = ?", (change.id,))
            execute("DELETE FROM pieces WHERE answer = ?", (change.id,))
        if answer is None:
            return
        facts = dict(answer.facts)
        if answer.source is not None:
            facts[_DRAWN] = answer.source.values
        if answer.request is not None:
            facts[_REQUEST] = answer.request.facts()
        fields = (answer.ended_at, now, json.dumps(facts))
        if change.is_new:
            body = b"" if answer.request is None or answer.ended_at is not None else answer.request.body
            row = (answer.id, answer.owner, *fields, body, answer.data)
            execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", row)  # a probe may have one
        elif answer.ended_at is None:
            execute("UPDATE answers SET ended_at = ?, written_at = ?, facts = ? WHERE id = ?", (*fields, answer.id))
        else:
            columns = "ended_at = ?, written_at = ?, facts = ?, body = x'', data = ?"
            # The columns are those of this module.
            execute(f"UPDATE answers SET {columns} WHERE id = ?", (*fields, answer.data, answer.id))  # noqa: S608

    def _write_pieces(self, pieces: Iterable[_Piece]) -> None:
        """Writes pieces of answers that there are."""
        statement = "INSERT OR REPLACE INTO pieces SELECT ?1, ?2, ?3, ?4 WHERE EXISTS"
        statement += " (SELECT 1 FROM answers WHERE id = ?1)"
        self._connection.executemany(statement, pieces)

    def _settle(self, where: str, *values: int) -> None:
        """Makes pieces of the log, or of some of it."""
        found = self._logged_entries(where, *values)
        self._write_pieces(
            (answer_id, CUTS, entries[-1].num_parts, b"".join([entry.cuts for entry in entries]))
            for answer_id, entries in found.items()
        )
        self._connection.execute(f"DELETE FROM log WHERE {where}", values)  # noqa: S608 (a constant)

    def _logged_entries(self, where: str = "TRUE", *values: int) -> dict[str, list[Entry]]:
        """The entries of the log by answer; raises TypeError or ValueError where it is damaged."""
        found: dict[str, list[Entry]] = {}
        query = f"SELECT data FROM log WHERE {where} ORDER BY number"  # noqa: S608 (a constant)
        for (data,) in self._connection.execute(query, values):
            for entry in map(Entry._make, msgpack.unpackb(data)):
                found.setdefault(entry.answer_id, []).append(entry)
        return found

    def _damaged(self, error: Exception) -> ServeError:
        return ServeError(f"{self._name} is damaged ({type(error).__name__}): move it away, or restore it")

    def _load(self) -> Iterator[KeptAnswer]:
        rows = self._connection.execute("SELECT * FROM answers ORDER BY ended_at IS NULL, ended_at, rowid").fetchall()
        logged = self._logged_entries()
        for answer_id, owner, ended_at, written_at, facts, body, data in rows:
            texts = (answer_id, owner, facts)
            if not all(isinstance(text, str) for text in texts) or not isinstance(ended_at, float | None):
                raise TypeError("a column has another type")
            pieces: list[list[bytes]] = [[], [], []]
            parts: list[bytes] = []
            cuts: dict[int, bytes] = {}
            query = "SELECT kind, number, data FROM pieces WHERE answer = ? ORDER BY kind, number"
            for kind, number, piece in self._connection.execute(query, (answer_id,)):
                if kind == PARTS:
                    parts[number:] = unpacked(piece) if piece[:1] == _COMPRESSED else msgpack.unpackb(piece)
                elif kind == CUTS:
                    cuts[number] = piece
                else:
                    pieces[kind].append(piece)
            cuts |= {entry.num_parts: entry.cuts for entry in logged.get(answer_id, ())}
            num_parts, cut_bytes = max(len(parts), *cuts, 0), b"".join([cuts[number] for number in sorted(cuts)])
            if not all(isinstance(one, bytes) for some in ((body, data, cut_bytes), parts, *pieces) for one in some):
                raise TypeError("a column has another type")
            known = json.loads(facts)
            values, request = known.pop(_DRAWN, None), known.pop(_REQUEST, None)
            source = None if values is None else AnswerSource(values, cut_bytes if ended_at is None else b"")
            yield KeptAnswer(
                answer_id, owner, known, data, ended_at, written_at, num_parts, parts,
                pieces[INPUTS], pieces[OUTPUTS], None if request is None else _request(request, body),
                source,
            )  # fmt: skip


def _request(facts: JSONObject, body: bytes) -> KeptRequest:
    headers = tuple((str(name), str(value)) for name, value in facts.pop("headers"))
    request = KeptRequest(body=body, headers=headers, **facts)
    texts, numbers = (request.path, request.identity), (request.seed, request.num_resumes)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, int) for one in numbers):
        raise TypeError("a fact of a request has another type")
    return request
