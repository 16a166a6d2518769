"""Sessions of a tenant that are known: their last prompts, and their pauses."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from llmstack_kv_cache.pauses import PauseClass, PauseTable
from llmstack_kv_cache.prefix_index import ROOT, Prefix

MAX_HEADS = 8
MAX_TRIED_TURNS = 64
"""A prompt is compared with so many turns that begin alike, the longest that it may extend first."""

BlockOf = Callable[[Sequence[int], int], bytes]
"""The block of a prompt that ends with its first so many tokens, packed."""


class Segment:
    """Blocks that are held, and later freed, together.

    Attributes:
        block_ids: While it is held, its blocks; once it is free, those of them that were free at some time.
        num_free: Of these, the blocks that are free as part of this segment; 0 while it is held.
        turn: The turn of a session that held it last; None where that is not known.
    """

    __slots__ = ("block_ids", "num_free", "turn")

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids
        self.num_free = 0
        self.turn: Turn | None = None


class Pause:
    """Free blocks, or a session without a request, since `began_s`.

    Attributes:
        number: Grows with each pause, and with each change of its class.
        stage: How far it has come.
        is_open: Whether its return, or that it takes long, is counted.
        segment: Its blocks, as far as they are free.
        turn: The turn after which it is; None where it is no session's.
    """

    __slots__ = ("began_s", "is_open", "number", "pause_class", "salt", "segment", "stage", "turn")

    def __init__(self, salt: str, pause_class: PauseClass, began_s: float, number: int) -> None:
        self.salt = salt
        self.pause_class = pause_class
        self.began_s = began_s
        self.number = number
        self.stage = 0
        self.is_open = True
        self.segment: Segment | None = None
        self.turn: Turn | None = None


class Session:
    """A chain of prompts that extend one another.

    Attributes:
        owner: Whose it is.
        kind: What it begins with, as a part of its class.
        num_head_blocks: Its first blocks, that others had when it began.
        num_shared_blocks: Its first blocks that another session had, or might have had, when it began.
        last: Its last turn that has ended.
        turns: Its turns that are known.
        num_running: Its requests that have not ended.
        name: What its client calls it; empty for nothing.
        is_final: Whether its blocks are given up when its request ends.
    """

    __slots__ = (
        "is_final", "kind", "last", "name", "num_head_blocks", "num_running", "num_shared_blocks", "owner", "turns",
    )  # fmt: skip

    def __init__(self, owner: str, kind: PauseClass, num_head_blocks: int, num_shared_blocks: int) -> None:
        self.owner = owner
        self.kind = kind
        self.num_head_blocks = num_head_blocks
        self.num_shared_blocks = num_shared_blocks
        self.last: Turn | None = None
        self.turns: dict[Turn, None] = {}
        self.num_running = 0
        self.name = ""
        self.is_final = False

    @property
    def is_known(self) -> bool:
        """Whether a request of it runs, or a turn is known."""
        return self.num_running > 0 or bool(self.turns)


class Running:
    """A request of a session: its first block of tokens, and the last whole block but one, which ends at `num_marked`.

    The last tokens of a prompt may be those of a template before an answer, which later prompts do not repeat.
    """

    __slots__ = ("first", "mark", "num_marked", "salt", "session")

    def __init__(self, salt: str, session: Session, first: bytes, num_marked: int, mark: bytes) -> None:
        self.salt = salt
        self.session = session
        self.first = first
        self.num_marked = num_marked
        self.mark = mark


class Turn:
    """A request that has ended.

    Attributes:
        request_id: Of the request.
        num_tokens: Of its prompt and its answer.
        ended_s: When it ended.
        heirs: The sessions that went on from it.
        prefix: What its whole blocks make.
        num_blocks: How many these are; 0 where it is not known.
        end: The last of them.
        lost: Why its blocks are gone, where they were not evicted.
        evicted_s, evicted_for: When the first of its blocks was evicted, and for which request; below 0 for none.
    """

    __slots__ = (
        "end", "ended_s", "evicted_for", "evicted_s", "heirs", "lost", "num_blocks", "num_tokens", "pause", "prefix",
        "request_id", "running",
    )  # fmt: skip

    def __init__(self, request_id: str, running: Running, num_tokens: int, pause: Pause, ended_s: float) -> None:
        self.request_id = request_id
        self.running = running
        self.num_tokens = num_tokens
        self.pause = pause
        self.ended_s = ended_s
        self.heirs: list[Session] = []
        self.prefix, self.num_blocks, self.end = ROOT, 0, b""
        self.lost, self.evicted_s, self.evicted_for = "", -1.0, ""
        pause.turn = self

    def lose(self, why: str) -> None:
        """Its blocks are no longer of interest, or gone."""
        self.lost, self.prefix = self.lost or why, ROOT

    def note_end(self, prefix: Prefix, num_blocks: int, end: bytes) -> None:
        """Notes the blocks of its request, which gives them up now."""
        self.prefix, self.num_blocks, self.end = prefix, num_blocks, end

    def num_known_tokens(self, token_ids: Sequence[int], block_size: int, block_of: BlockOf) -> int:
        """Computed tokens of a prompt that extends the turn, in whole blocks: all, or the marked ones."""
        num_tokens = (self.num_blocks or self.num_tokens // block_size) * block_size
        if self.end and not (num_tokens <= len(token_ids) and block_of(token_ids, num_tokens) == self.end):
            return self.running.num_marked
        return num_tokens


class SessionNames:
    """The known sessions that have a name, by their owner and it. Each change is to be passed to it."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], dict[Session, None]] = {}

    def named(self, owner: str, name: str) -> list[Session]:
        """The sessions of an owner that have a name, that with the oldest pause first. O(their number)."""
        return sorted(self._sessions.get((owner, name), ()), key=_last_pause)

    def call(self, session: Session, owner: str, name: str) -> None:
        """A session is another owner's, or has another name."""
        if (owner, name) != (session.owner, session.name):
            self._leave(session)
            session.owner, session.name = owner, name
            self._enter(session)

    def begin(self, session: Session) -> None:
        """A request of the session begins."""
        session.num_running += 1
        self._enter(session)

    def end(self, session: Session) -> None:
        """A request of the session has ended."""
        session.num_running -= 1
        self._leave_unknown(session)

    def add(self, turn: Turn) -> None:
        """A turn is known from now on."""
        session = turn.running.session
        session.turns[turn] = None
        self._enter(session)

    def drop(self, turn: Turn) -> None:
        """A turn is forgotten."""
        session = turn.running.session
        session.turns.pop(turn, None)
        self._leave_unknown(session)

    def _enter(self, session: Session) -> None:
        if session.name and session.is_known:
            self._sessions.setdefault((session.owner, session.name), {})[session] = None

    def _leave_unknown(self, session: Session) -> None:
        if not session.is_known:
            self._leave(session)

    def _leave(self, session: Session) -> None:
        sessions = self._sessions.get((session.owner, session.name), {})
        if sessions.pop(session, self) is None and not sessions:
            del self._sessions[session.owner, session.name]


def _last_pause(session: Session) -> int:
    """In snapshots, too, so that a restored cache releases sessions in the same order."""
    return -1 if session.last is None else session.last.pause.number


class _Alike:
    """Turns with the same first block: by what ends at `num_marked`, and by that place."""

    __slots__ = ("by_length", "heads", "lengths")

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.by_length: dict[int, dict[bytes, Turn]] = {}
        self.heads: OrderedDict[tuple[int, bytes], None] = OrderedDict()


class Tenant:
    """The turns of one tenant, by what a prompt must contain to extend them.

    Attributes:
        owner: Whose tenant it is.
        table: What is known of its pauses.
        longest: The tokens of its longest turn.
        others: How many blocks at most a prompt of each owner has found, where there are several.
    """

    def __init__(self, owner: str, names: SessionNames) -> None:
        """`names` receives its turns."""
        self.owner = owner
        self._names = names
        self.table = PauseTable()
        self.longest = 0
        self.others: dict[str, int] = {}
        self._paused: OrderedDict[Turn, None] = OrderedDict()
        self._continued: OrderedDict[Turn, None] = OrderedDict()
        self._by_first: dict[bytes, _Alike] = {}

    def find(self, first: bytes, token_ids: Sequence[int], block_of: BlockOf) -> Turn | None:
        """The longest turn that the prompt extends. O(`MAX_TRIED_TURNS`)."""
        alike = self._by_first.get(first)
        if alike is None:
            return None
        end = bisect_right(alike.lengths, len(token_ids))
        for length in reversed(alike.lengths[max(end - MAX_TRIED_TURNS, 0) : end]):
            turn = alike.by_length[length].get(block_of(token_ids, length))
            if turn is not None:
                return turn
        return None

    def num_head_blocks(
        self, first: bytes, token_ids: Sequence[int], block_of: BlockOf, block_size: int, num_found: int
    ) -> int:
        """Blocks of a prompt, more than `num_found`, that are what sessions before it began with; 0 for none known."""
        alike = self._by_first.get(first)
        heads = (
            () if alike is None else (one for one in alike.heads if num_found < one[0] <= len(token_ids) // block_size)
        )
        return max((number for number, last in heads if block_of(token_ids, number * block_size) == last), default=0)

    def note_head(self, first: bytes, num_blocks: int, last: bytes) -> None:
        """A session has begun with so many blocks of others; the last few such beginnings are known."""
        alike = self._by_first.get(first)
        if alike is not None:
            alike.heads[num_blocks, last] = None
            alike.heads.move_to_end((num_blocks, last))
            if len(alike.heads) > MAX_HEADS:
                alike.heads.popitem(last=False)

    def note_found(self, owner: str, num_blocks: int, most: int) -> None:
        """A prompt of an owner has found blocks; beyond `most` owners they count as one, of no name."""
        others = self.others
        if owner not in others and len(others) >= most:
            owner = ""
        others[owner] = max(others.get(owner, 0), num_blocks)

    def num_kept_blocks(self, session: Session) -> int:
        """The first blocks of a session that others may share: found by it, or found of it."""
        alike = self._by_first.get(session.last.running.first) if session.last is not None else None
        turns = () if alike is None else (one for by_mark in alike.by_length.values() for one in by_mark.values())
        others = {turn.running.session for turn in turns if not turn.lost} - {session}
        kept = [session.num_shared_blocks, *(one.num_shared_blocks for one in others)]
        return max([*kept, *(number for owner, number in self.others.items() if owner != session.owner)])

    @property
    def num_turns(self) -> int:
        """Turns that are known."""
        return len(self._paused) + len(self._continued)

    @property
    def turns(self) -> Iterable[Turn]:
        """The turns that are known."""
        return [*self._paused, *self._continued]

    def state(self) -> tuple[list[Turn], list[Turn], list[list[object]]]:
        """The turns that pause, and those that a session has gone on from, each in their order; and the beginnings."""
        heads = [
            [first, *head] for first, alike in sorted(self._by_first.items(), key=itemgetter(0)) for head in alike.heads
        ]
        return list(self._paused), list(self._continued), heads

    def restore(
        self, paused: Iterable[Turn], continued: Iterable[Turn], heads: Iterable[tuple[bytes, int, bytes]]
    ) -> None:
        """Puts a new one into a state."""
        self._paused, self._continued = OrderedDict.fromkeys(paused), OrderedDict.fromkeys(continued)
        for turn in [*self._continued, *self._paused]:
            self._enter(turn)
            self._names.add(turn)
        for first, num_blocks, last in heads:
            self.note_head(first, num_blocks, last)

    def open_turns(self) -> Iterable[Turn]:
        """The turns that pause, the longest pause first."""
        return iter(self._paused)

    def forget_heads(self) -> None:
        """Forgets the beginnings that sessions share."""
        for alike in self._by_first.values():
            alike.heads.clear()

    def add(self, turn: Turn, most: int) -> list[Turn]:
        """Notes a turn; those that are forgotten for it, since more than `most` pause."""
        run = turn.running
        alike = self._by_first.get(run.first)
        known = None if alike is None else alike.by_length.get(run.num_marked, {}).get(run.mark)
        gone = [] if known is None else [known]
        if len(self._paused) >= most:
            gone.append(next(iter(self._paused)))
        self._enter(turn)
        for old in gone:
            self._forget(old)
        self._paused[turn] = None
        self._names.add(turn)
        return gone

    def drop(self) -> None:
        """All of it is forgotten, and what pauses is no longer open."""
        for turn in self.turns:
            self._names.drop(turn)
        for turn in self._paused:
            turn.pause.is_open = False

    def close(self, turn: Turn, most: int) -> None:
        """A session has gone on from the turn; of such turns the last `most` are known."""
        self._paused.pop(turn, None)
        self._continued[turn] = None
        if len(self._continued) > most:
            self._forget(next(iter(self._continued)))

    def _enter(self, turn: Turn) -> None:
        run = turn.running
        alike = self._by_first.setdefault(run.first, _Alike())
        by_mark = alike.by_length.get(run.num_marked)
        if by_mark is None:
            by_mark = alike.by_length[run.num_marked] = {}
            insort(alike.lengths, run.num_marked)
        by_mark[run.mark] = turn

    def _forget(self, turn: Turn) -> None:
        self._paused.pop(turn, None)
        self._continued.pop(turn, None)
        self._names.drop(turn)
        turn.heirs = []
        turn.lose("forgotten")
        run = turn.running
        alike = self._by_first.get(run.first)
        by_mark = {} if alike is None else alike.by_length.get(run.num_marked, {})
        if alike is None or by_mark.get(run.mark) is not turn:
            return
        del by_mark[run.mark]
        if not by_mark:
            del alike.by_length[run.num_marked]
            alike.lengths.remove(run.num_marked)
        if not alike.lengths:
            del self._by_first[run.first]
