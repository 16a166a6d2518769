"""An order of eviction by sessions: what is wanted last goes first.

A session is a chain of prompts that extend one another. It is found by its tokens: a prompt continues the session whose
last prompt it contains. Between two prompts a session pauses. How long pauses last is learned for each tenant: by how
the answer ended, so that a call of a tool differs from the end of an exchange, and by the beginning that sessions
share, so that a subagent differs from the agent that calls it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llmstack_kv_cache.pause_groups import PauseGroups
from llmstack_kv_cache.pauses import ENDS_S, HORIZON_S, NUM_STAGES, PauseClass, PauseTable
from llmstack_kv_cache.session_ledger import TURN, SessionLedger
from llmstack_kv_cache.session_turns import Pause, Segment, Session, Tenant, Turn

_LONG_SHARE = 0.8
"""A context of that share of the tenant's longest one may be replaced by a summary."""

_LIKELY = 0.75
"""A chance of a return from which on an agent is still at work."""

PLAIN: PauseClass = ("plain",)
HEAD: PauseClass = ("head",)
SIBLING: PauseClass = ("sibling",)
REPLACED: PauseClass = ("replaced",)
LEFT: PauseClass = ()
"""What a session left behind that went on elsewhere, or was given up."""


class SessionSegments(OrderedDict[Segment, None]):
    """The free segments by their release; tells an order of eviction what comes and goes."""

    def __init__(self, order: SessionOrder) -> None:
        super().__init__()
        self._order = order

    def __setitem__(self, segment: Segment, value: None) -> None:
        super().__setitem__(segment, value)
        self._order.add(segment)

    def __delitem__(self, segment: Segment) -> None:
        super().__delitem__(segment)
        self._order.remove(segment)

    def clear(self) -> None:
        """Removes every segment from the order as well."""
        for segment in list(self):
            del self[segment]


class SessionOrder(SessionLedger):
    """Which free blocks are evicted next, by the pauses of sessions. No tenant's pauses count for another one.

    Attributes:
        segments: The free segments.
    """

    follows_all = True

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.segments = SessionSegments(self)
        self.pauses: dict[Segment, Pause] = {}
        self.due: list[tuple[float, int, Pause]] = []
        self._plain = PauseTable()
        self._groups = PauseGroups(self._worth)

    @property
    def num_snapshot_items(self) -> int:
        """The number of values in a snapshot of it, about."""
        return super().num_snapshot_items + 6 * len(self.segments)

    def take_ended(self, segment: Segment) -> Segment | None:
        """Makes a segment that is released that of the request that has just ended, if one has.

        What it shares with other sessions is wanted at other times: it becomes a segment of its own.
        """
        if segment.turn is None:
            return None
        self.pauses[segment] = pause = segment.turn.pause
        num_blocks = segment.turn.running.session.num_head_blocks
        if not num_blocks:
            return None
        head = Segment(segment.block_ids[:num_blocks])
        del segment.block_ids[:num_blocks]
        self.pauses[head] = head_pause = self._new_pause(pause.salt, HEAD)
        head_pause.is_open = False  # as long as another request holds its blocks
        return head

    def add(self, segment: Segment) -> None:
        """A segment has become free."""
        pause = self.pauses.get(segment)
        if pause is None:
            pause = self.pauses[segment] = self._new_pause("", PLAIN)
        pause.segment = segment
        pause.is_open |= pause.pause_class == HEAD
        self._groups.enter(pause)

    def remove(self, segment: Segment) -> None:
        """A segment has no free blocks left."""
        pause = self.pauses.pop(segment, None)
        if pause is not None:
            self._groups.exit(pause)
            pause.segment = None
            pause.is_open &= pause.turn is not None  # whether it is wanted again shows no more

    def leave(self, segment: Segment) -> None:
        """Requests hold blocks that were free as part of the segment."""
        pause = self.pauses.get(segment)
        if pause is not None and pause.pause_class == HEAD and not segment.num_free:
            self._advance()
            self._count(pause, returns=True)
            pause.is_open = False

    def next(self) -> Segment:
        """The segment to be evicted next, of which there must be one: the least likely to be wanted soon."""
        self._advance()
        return self._groups.least()

    def restore(self, segments: Iterable[Segment], pauses: Iterable[Pause]) -> None:
        """Takes the free segments, with the pauses they have, and all pauses of a snapshot into a new order."""
        for segment in segments:
            OrderedDict.__setitem__(self.segments, segment, None)
            self.pauses[segment].segment = segment
        for pause in sorted(pauses, key=lambda pause: (pause.began_s, pause.number)):
            self._groups.enter(pause)
            if pause.stage < NUM_STAGES - 1:
                heapq.heappush(self.due, (pause.began_s + ENDS_S[pause.stage], pause.number, pause))

    def _chance(self, pause: Pause) -> float:
        return self._worth(pause.salt, pause.pause_class, pause.stage)

    def _worth(self, salt: str, pause_class: PauseClass, stage: int) -> float:
        if not pause_class:
            return 0.0
        tenant = self.tenants.get(salt)
        worth = (self._plain if tenant is None else tenant.table).worth(pause_class, stage)
        # Without its head, no session that begins with it is found.
        return worth + (pause_class == HEAD and (not stage or ENDS_S[stage - 1] < HORIZON_S))

    def _count(self, pause: Pause, *, returns: bool) -> None:
        tenant = self.tenants.get(pause.salt)
        if pause.is_open and tenant is not None and pause.pause_class not in (PLAIN, LEFT):
            tenant.table.count(pause.pause_class, pause.stage, returns=returns)
            self._groups.change()

    def _forget_one(self) -> None:
        super()._forget_one()
        self._groups.change()

    def _new_session(self, tenant: Tenant, first: bytes, token_ids: Sequence[int], num_head: int) -> Session:
        """A prompt that continues none: another session, or the summary of one whose context became too long."""
        session = super()._new_session(tenant, first, token_ids, num_head)
        end = num_head * self._block_size
        session.kind = (num_head, tuple(token_ids[end - self._block_size : end])) if num_head else ()
        candidates = [
            turn for turn in tenant.open_turns()
            if turn.num_tokens >= _LONG_SHARE * tenant.longest and turn.running.first == first
            and turn.running.session.kind in ((), session.kind) and turn.pause.pause_class[:1] == TURN
            and self._chance(turn.pause) >= _LIKELY
        ]  # fmt: skip
        if candidates:
            self._restart(max(candidates, key=lambda turn: turn.num_tokens).pause, REPLACED)
        return session

    def _go_on(self, tenant: Tenant, turn: Turn, owner: str) -> Session:
        """The session of a prompt that extends a turn. In a new one, idle heirs of the turn count as siblings."""
        heirs, session = turn.heirs, super()._go_on(tenant, turn, owner)
        if session is turn.running.session:
            return session
        for heir in heirs:
            last = heir.last
            if last is None or last is turn or not last.pause.is_open or last.pause.pause_class[:1] != TURN:
                continue
            if self._chance(last.pause) < _LIKELY:
                self._restart(last.pause, SIBLING)
        return session

    def _close(self, turn: Turn) -> None:
        self._count(turn.pause, returns=True)
        super()._close(turn)
        if turn.pause.segment is not None:
            self._restart(turn.pause, LEFT)

    def _give_up(self, turn: Turn) -> None:
        super()._give_up(turn)
        if turn.pause.segment is not None:
            self._restart(turn.pause, LEFT)

    def _class_of(self, tenant: Tenant, session: Session, ending: tuple[int, ...]) -> PauseClass:
        return tenant.table.known((*TURN, *ending, *session.kind))

    def _new_pause(self, salt: str, pause_class: PauseClass) -> Pause:
        pause = super()._new_pause(salt, pause_class)
        heapq.heappush(self.due, (self.now_s + ENDS_S[0], pause.number, pause))
        return pause

    def _restart(self, pause: Pause, pause_class: PauseClass) -> None:
        """Moves a pause to another class."""
        self._groups.exit(pause)
        self.num_pauses += 1
        pause.pause_class, pause.began_s, pause.stage, pause.number = pause_class, self.now_s, 0, self.num_pauses
        heapq.heappush(self.due, (self.now_s + ENDS_S[0], pause.number, pause))
        self._groups.enter(pause)

    def _advance(self) -> None:
        """Lets all pauses come to where they are by now."""
        due, now_s = self.due, self.now_s
        while due and due[0][0] <= now_s:
            _, number, pause = heapq.heappop(due)
            if number != pause.number or not (pause.is_open or pause.segment is not None):
                continue
            self._count(pause, returns=False)
            self._groups.exit(pause)
            pause.stage += 1
            self._groups.enter(pause)
            if pause.stage < NUM_STAGES - 1:
                heapq.heappush(due, (pause.began_s + ENDS_S[pause.stage], number, pause))
