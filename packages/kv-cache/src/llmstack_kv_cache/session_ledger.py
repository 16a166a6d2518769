"""The turns of sessions, and counters of tokens that are computed again.

A session is a chain of prompts that extend one another. It is found by its tokens: a prompt continues the session whose
last prompt it contains. A name that its client gives it adds that the session can be released by this name.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from llmstack_kv_cache.block import BlockTable
from llmstack_kv_cache.computed_tokens import CAUSES, OF_DISK_MISS, ComputedTokens
from llmstack_kv_cache.pauses import PauseClass
from llmstack_kv_cache.prefix_index import ROOT, Prefix, PrefixIndex
from llmstack_kv_cache.session_turns import Pause, Running, Session, SessionNames, Tenant, Turn

MAX_TENANTS = 64
MAX_PAUSED_TURNS = 512
MAX_CONTINUED_TURNS = 128
MIN_NUM_TOKENS = 256
"""Shorter prompts are not followed where nothing depends on it: that takes as long as a fifth of their scheduling."""
MAX_RETURNS = 1024
"""Returns of sessions that are kept until they are taken."""

TURN: PauseClass = ("turn",)

Return = tuple[str, str, float, int, int, str, float, str]
"""A session has gone on: the request, that of its last turn, the seconds since that ended, its tokens in whole blocks,
how many of them were found, why the others were not, after how many seconds the first of them was evicted, and for
which request; below 0 and nothing where it was not."""


class NoSessions:
    """Takes no notice of sessions: for a cache that finds nothing."""

    now_s = 0.0
    follows_all = False
    num_computed_tokens: Sequence[int] = (0,) * len(CAUSES)

    def begin(
        self, request_id: str, token_ids: Sequence[int], salt: str, num_found_tokens: int, owner: str = "",
        *, num_known_tokens: int = 0, name: str = "", is_final: bool = False, disk_miss: str = "",
        is_looked_up: bool = True,
    ) -> None:  # fmt: skip
        """Notes nothing of a request that begins."""

    def resume(self, num_lost_tokens: int) -> None:
        """Notes nothing of a request that goes on."""

    def end(self, request_id: str, num_tokens: int, ending: tuple[int, ...], token_ids: Sequence[int] = ()) -> None:
        """Notes nothing of a request that has ended."""

    def take_returns(self) -> list[Return]:
        """Returns nothing, since no session is known."""
        return []


class SessionLedger(NoSessions):
    """The turns of sessions, and counters of tokens that are computed.

    Pure: the time is what its caller says. Bounded: `MAX_TENANTS` tenants, each with as many turns. A tenant is a salt.
    Of the owner with the most of them, that which was away the longest is forgotten.

    Attributes:
        follows_all: Whether short prompts that have no name are followed, too.
        now_s: The time; its caller moves it on.
        computed: Counters of tokens that requests compute, by cause.
        num_turns, num_continued: Counters of the requests, and of those that went on with a session.
        names: The sessions by their names.
        ended: The turn whose request is freed next.
    """

    def __init__(self, block_size: int) -> None:
        self.now_s = 0.0
        self.computed = ComputedTokens()
        self.num_computed_tokens = self.computed.counts
        self.num_turns = self.num_continued = self.num_pauses = 0
        self.tenants: OrderedDict[str, Tenant] = OrderedDict()
        self.running: dict[str, Running] = {}
        self.names = SessionNames()
        self.ended: Turn | None = None
        self._ended_tokens: Sequence[int] = ()
        self._returns: deque[Return] = deque(maxlen=MAX_RETURNS)
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack

    @property
    def num_snapshot_items(self) -> int:
        """The number of values in a snapshot of it, about."""
        num_turns = sum(tenant.num_turns for tenant in self.tenants.values()) + len(self.running)
        return (3 * self._block_size + 24) * num_turns

    def begin(
        self, request_id: str, token_ids: Sequence[int], salt: str, num_found_tokens: int, owner: str = "",
        *, num_known_tokens: int = 0, name: str = "", is_final: bool = False, disk_miss: str = "",
        is_looked_up: bool = True,
    ) -> None:  # fmt: skip
        """A request begins. One that goes on after a preemption does not.

        Args:
            request_id: Of the request.
            token_ids: Its prompt.
            salt: Prefixes are found under it.
            num_found_tokens: How much of the prompt was found.
            owner: Who may have several salts.
            num_known_tokens: How much was there, of which the last part has no state.
            name: What its client calls the session.
            is_final: Whether the session is given up when the request ends.
            disk_miss: What was in the way of blocks on disk.
            is_looked_up: Whether the prompt was looked for at all.
        """
        size, num_tokens = self._block_size, len(token_ids)
        num_marked = (num_tokens // size - 1) * size
        if num_marked <= size or not (self.follows_all or num_tokens >= MIN_NUM_TOKENS or name or is_final):
            self.computed.add("new", num_tokens - num_found_tokens)
            return
        self._advance()
        tenant = self._tenant(salt, owner)
        self.num_turns += 1
        first, num_found = self._pack(*token_ids[:size]), num_found_tokens // size
        turn = tenant.find(first, token_ids, self._block)
        known = self._count_prompt(
            tenant, turn, first, token_ids, num_found_tokens, num_known_tokens, disk_miss, is_looked_up
        )
        if turn is None:
            session = self._new_session(tenant, first, token_ids, num_found)
            session.num_shared_blocks = max(session.num_shared_blocks, num_found)
        else:
            self.num_continued += 1
            num_whole, num_again, cause = known
            self._returns.append((
                request_id, turn.request_id, self.now_s - turn.ended_s, num_whole, num_whole - num_again, cause,
                max(turn.evicted_s - turn.ended_s, 0.0) if turn.evicted_for else -1.0, turn.evicted_for,
            ))  # fmt: skip
            session = self._go_on(tenant, turn, owner)
            if session is not turn.running.session:
                session.num_shared_blocks = max(num_found, 0 if turn.lost else turn.num_tokens // size)
        self.names.call(session, owner, name or session.name)
        session.is_final |= is_final
        if len(tenant.others) > 1 or owner != tenant.owner:
            tenant.note_found(tenant.owner, max(session.num_shared_blocks, num_found), MAX_TENANTS)
        if tenant.others or owner != tenant.owner:
            tenant.note_found(owner, num_found, MAX_TENANTS)
        if (before := self.running.get(request_id)) is not None:  # it begins again
            self.names.end(before.session)
        self.names.begin(session)
        self.running[request_id] = Running(salt, session, first, num_marked, self._block(token_ids, num_marked))

    def resume(self, num_lost_tokens: int) -> None:
        """A request goes on after a preemption, and computes so many tokens again."""
        self.computed.add("preempted", num_lost_tokens)

    def end(self, request_id: str, num_tokens: int, ending: tuple[int, ...], token_ids: Sequence[int] = ()) -> None:
        """A request has ended; if it holds blocks, they are what is released next.

        Args:
            request_id: Of any request.
            num_tokens: Of its prompt and its answer; 0 where it holds no blocks.
            ending: How it ended, the most general first.
            token_ids: Its prompt and its answer.
        """
        if (running := self.running.pop(request_id, None)) is None:
            return
        self.names.end(running.session)
        tenant = self.tenants.get(running.salt)
        if tenant is None or not num_tokens:
            return
        self._advance()
        session = running.session
        pause = self._new_pause(running.salt, self._class_of(tenant, session, ending))
        turn = Turn(request_id, running, num_tokens, pause, self.now_s)
        session.last = turn
        tenant.longest = max(tenant.longest, num_tokens)
        for old in tenant.add(turn, MAX_PAUSED_TURNS):
            old.pause.is_open = False
        self.ended, self._ended_tokens = turn, token_ids

    def free(self, table: BlockTable) -> Session | None:
        """The request that has just ended gives up its blocks; its session, if that is final."""
        turn, token_ids = self.ended, self._ended_tokens
        if turn is None:
            return None
        self.ended, self._ended_tokens = None, ()
        table.turn, num_tokens = turn, table.num_cached_blocks * self._block_size
        end = self._block(token_ids, num_tokens) if len(token_ids) >= num_tokens > 0 else b""
        turn.note_end(table.prefix, table.num_cached_blocks, end)
        session = turn.running.session
        return session if session.is_final else None

    def note_evicted(self, turn: Turn, index: PrefixIndex, left: Sequence[int], request_id: str) -> None:
        """The last blocks of a turn are evicted for a request, and some are left."""
        turn.prefix = index.prefix(left[-1]) if left and not turn.lost else ROOT
        if not turn.evicted_for:
            turn.evicted_s, turn.evicted_for = self.now_s, request_id

    def named(self, owner: str, name: str) -> list[Session]:
        """The sessions of an owner that have a name. O(their number)."""
        return self.names.named(owner, name)

    def release(self, session: Session) -> tuple[Prefix, int]:
        """Gives up a session: what its blocks make, and how many of them at the beginning may be others'.

        What it computes now is given up when that ends. O(its turns, and those that begin as it does).
        """
        session.is_final = session.num_running > 0
        turn = session.last
        tenant = None if turn is None else self.tenants.get(turn.running.salt)
        if turn is None or tenant is None or turn.lost:
            return ROOT, 0
        prefix, num_kept = turn.prefix, tenant.num_kept_blocks(session)
        for one in session.turns:
            one.lose("released")
        self._give_up(turn)
        return prefix, num_kept

    def reset(self) -> None:
        """Every block is forgotten."""
        for tenant in self.tenants.values():
            tenant.forget_heads()
            for turn in tenant.turns:
                turn.lose("reset")

    def take_returns(self) -> list[Return]:
        """The sessions that have gone on since the last call."""
        returns = list(self._returns)
        self._returns.clear()
        return returns

    def _count_prompt(
        self, tenant: Tenant, turn: Turn | None, first: bytes, token_ids: Sequence[int], num_found: int,
        num_known: int, disk_miss: str, is_looked_up: bool,
    ) -> tuple[int, int, str]:  # fmt: skip
        """Counts what a prompt computes: what it had before in whole blocks, how much of that again, and why."""
        size, num_tokens, add = self._block_size, len(token_ids), self.computed.add
        num_before, cause = 0, "evicted"
        if turn is not None:
            num_before, cause = turn.num_known_tokens(token_ids, size, self._block), turn.lost or cause
            num_ends = min(turn.num_tokens - num_before, size - 1) if turn.num_tokens > num_before else 0
        else:
            num_before = size * tenant.num_head_blocks(first, token_ids, self._block, size, num_found // size)
            num_ends = 0
        if num_before <= num_found and turn is None and (elsewhere := self._elsewhere(tenant, first, token_ids)):
            num_before, cause = elsewhere.num_known_tokens(token_ids, size, self._block), "other_adapter"
        num_whole = max(min(num_before, (num_tokens - 1) // size * size), num_found)
        num_stateless = max(min(num_known, num_whole) - num_found, 0)
        num_again = num_whole - num_found - num_stateless
        if not is_looked_up:
            cause = "not_looked_up"
        elif cause == "evicted":
            cause = OF_DISK_MISS.get(disk_miss, cause)
        num_ends = min(num_ends + max(num_before - num_whole, 0), num_tokens - num_whole)
        add("no_state", num_stateless)
        add(cause, num_again)
        add("block_end", num_ends)
        add("new", num_tokens - num_whole - num_ends)
        return num_whole, num_again + num_stateless, cause if num_again else "no_state" if num_stateless else ""

    def _elsewhere(self, tenant: Tenant, first: bytes, token_ids: Sequence[int]) -> Turn | None:
        """The turn of the same owner, under another adapter or salt, that the prompt extends."""
        if len(self.tenants) == 1:
            return None
        others = (one for one in self.tenants.values() if one is not tenant and one.owner == tenant.owner)
        found = (other.find(first, token_ids, self._block) for other in others)
        return next((turn for turn in found if turn is not None), None)

    def _block(self, token_ids: Sequence[int], end: int) -> bytes:
        return self._pack(*token_ids[end - self._block_size : end])

    def _tenant(self, salt: str, owner: str) -> Tenant:
        tenant = self.tenants.get(salt)
        if tenant is None:
            if len(self.tenants) >= MAX_TENANTS:
                self._forget_one()
            tenant = self.tenants[salt] = Tenant(owner, self.names)
        self.tenants.move_to_end(salt)
        return tenant

    def _forget_one(self) -> None:
        """Forgets the tenant that was away the longest, of the owner with the most: others keep what they have."""
        counts = Counter(tenant.owner for tenant in self.tenants.values())
        most = max(counts.values())
        salt = next(salt for salt, tenant in self.tenants.items() if counts[tenant.owner] == most)
        self.tenants.pop(salt).drop()

    def _new_session(self, tenant: Tenant, first: bytes, token_ids: Sequence[int], num_head: int) -> Session:
        """A prompt that continues none."""
        if num_head:
            tenant.note_head(first, num_head, self._block(token_ids, num_head * self._block_size))
        return Session(tenant.owner, (), num_head, num_head)

    def _go_on(self, tenant: Tenant, turn: Turn, owner: str) -> Session:
        """The session of a prompt that extends a turn, perhaps as another one has done before, or one of its own."""
        session = turn.running.session
        if session.last is turn and turn.pause.is_open and session.owner == owner:
            self._close(turn)
            turn.heirs.append(session)
            tenant.close(turn, MAX_CONTINUED_TURNS)
            return session
        branch = Session(session.owner, session.kind, session.num_head_blocks, 0)
        turn.heirs = [*turn.heirs[-7:], branch]
        return branch

    def _new_pause(self, salt: str, pause_class: PauseClass) -> Pause:
        self.num_pauses += 1
        return Pause(salt, pause_class, self.now_s, self.num_pauses)

    def _class_of(self, tenant: Tenant, session: Session, ending: tuple[int, ...]) -> PauseClass:
        """The class of the pause after a turn."""
        return TURN

    def _advance(self) -> None:
        """Lets all pauses come to where they are by now."""

    def _close(self, turn: Turn) -> None:
        """A session goes on from its last turn."""
        turn.pause.is_open = False

    def _give_up(self, turn: Turn) -> None:
        """A session does not go on from its last turn."""
        turn.pause.is_open = False
