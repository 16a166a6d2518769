"""Snapshots of what a cache knows of sessions: plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from llmstack_kv_cache.pauses import as_tuple
from llmstack_kv_cache.prefix_index import ROOT, Prefix, Run
from llmstack_kv_cache.session_ledger import SessionLedger
from llmstack_kv_cache.session_order import SessionOrder
from llmstack_kv_cache.session_turns import Pause, Running, Segment, Session, Tenant, Turn

State = dict[str, Any]
_T = TypeVar("_T")


def ledger_state(ledger: SessionLedger, segments: Sequence[Segment]) -> State:
    """All that its answers depend on. `segments` are the free ones, by their number in the snapshot of the cache."""
    made = _Numbers()
    tenants = [
        [
            salt, tenant.owner, tenant.table.state(), tenant.longest, list(tenant.others.items()),
            *([made.turn(turn) for turn in turns] for turns in tenant.state()[:2]), tenant.state()[2],
        ]
        for salt, tenant in ledger.tenants.items()
    ]  # fmt: skip
    running = [[request_id, *made.running(one)] for request_id, one in ledger.running.items()]
    of_segments = [-1 if segment.turn is None else made.turn(segment.turn) for segment in segments]
    pauses = [] if not isinstance(ledger, SessionOrder) else [made.pause(ledger.pauses[one]) for one in segments]
    made.finish()
    return {
        "now_s": ledger.now_s,
        "counts": [ledger.num_turns, ledger.num_continued, ledger.num_pauses],
        "computed": ledger.computed.counts.copy(),
        "tenants": tenants,
        "running": running,
        "segments": of_segments,
        "segment_pauses": pauses,
        "pauses": [
            [one.salt, list(one.pause_class), one.began_s, one.number, one.stage, one.is_open] for one in made.pauses
        ],
        "turns": made.turn_states,
        "sessions": made.session_states,
    }


def restore_ledger(ledger: SessionLedger, state: State, segments: Sequence[Segment], runs: Mapping[int, Run]) -> None:
    """Puts a new ledger into a state, where `segments` are the free ones of the restored cache, and `runs` its runs."""
    ledger.now_s = state["now_s"]
    ledger.num_turns, ledger.num_continued, ledger.num_pauses = state["counts"]
    ledger.computed.counts[:] = state["computed"]
    pauses = []
    for salt, pause_class, began_s, number, stage, is_open in state["pauses"]:
        pause = Pause(salt, as_tuple(pause_class), began_s, number)
        pause.stage, pause.is_open = stage, is_open
        pauses.append(pause)
    sessions = [_session(one) for one in state["sessions"]]
    turns = [_turn(one, sessions, pauses, runs) for one in state["turns"]]
    for turn, (*_, heirs) in zip(turns, state["turns"], strict=True):
        turn.heirs = [sessions[heir] for heir in heirs]
    for session, (*_, last) in zip(sessions, state["sessions"], strict=True):
        session.last = None if last < 0 else turns[last]
    for salt, owner, table, longest, others, paused, continued, heads in state["tenants"]:
        tenant = ledger.tenants[salt] = Tenant(owner, ledger.names)
        tenant.longest, tenant.others = longest, dict(others)
        tenant.table.restore(table)
        tenant.restore((turns[one] for one in paused), (turns[one] for one in continued), heads)
    for request_id, *running in state["running"]:
        ledger.running[request_id] = _running(sessions, running)
        ledger.names.begin(ledger.running[request_id].session)
    for segment, number in zip(segments, state["segments"], strict=True):
        segment.turn = None if number < 0 else turns[number]
    if isinstance(ledger, SessionOrder):
        for segment, number in zip(segments, state["segment_pauses"], strict=True):
            ledger.pauses[segment] = pauses[number]
        ledger.restore(segments, pauses)


def _session(state: Sequence[Any]) -> Session:
    owner, kind, num_head_blocks, num_shared_blocks, name, is_final, _ = state
    session = Session(owner, as_tuple(kind), num_head_blocks, num_shared_blocks)
    session.name, session.is_final = name, is_final
    return session


def _turn(state: Sequence[Any], sessions: list[Session], pauses: list[Pause], runs: Mapping[int, Run]) -> Turn:
    request_id, running, num_tokens, pause, ended_s, place, num_blocks, end, lost, evicted_s, evicted_for, _ = state
    turn = Turn(request_id, _running(sessions, running), num_tokens, pauses[pause], ended_s)
    run = runs.get(place[0])
    turn.note_end(ROOT if run is None else Prefix(run, place[1]), num_blocks, end)
    turn.lost, turn.evicted_s, turn.evicted_for = lost, evicted_s, evicted_for
    return turn


def _running(sessions: list[Session], state: Sequence[Any]) -> Running:
    salt, session, first, num_marked, mark = state
    return Running(salt, sessions[session], first, num_marked, mark)


def _place(prefix: Prefix) -> list[int]:
    """The place where a prefix ends, as far as it can be found."""
    run, index = prefix.run, min(prefix.index, len(prefix.run.block_ids) - 1)
    return [run.start, index] if index >= 0 else [0, 0]


class _Numbers:
    """Numbers by which sessions, turns and pauses name each other in a snapshot."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self.turn_states: list[list[Any]] = []
        self.session_states: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        self._turns: list[Turn] = []
        self._sessions: list[Session] = []

    def pause(self, pause: Pause) -> int:
        return self._number(pause, self.pauses)

    def turn(self, turn: Turn) -> int:
        return self._number(turn, self._turns)

    def running(self, one: Running) -> list[Any]:
        return [one.salt, self._number(one.session, self._sessions), one.first, one.num_marked, one.mark]

    def finish(self) -> None:
        """Notes all that is named, until nothing new is."""
        while len(self.turn_states) < len(self._turns) or len(self.session_states) < len(self._sessions):
            for turn in self._turns[len(self.turn_states) :]:
                heirs = [self._number(heir, self._sessions) for heir in turn.heirs]
                self.turn_states.append([
                    turn.request_id, self.running(turn.running), turn.num_tokens, self.pause(turn.pause), turn.ended_s,
                    _place(turn.prefix), turn.num_blocks, turn.end, turn.lost, turn.evicted_s, turn.evicted_for, heirs,
                ])  # fmt: skip
            for session in self._sessions[len(self.session_states) :]:
                last = -1 if session.last is None else self.turn(session.last)
                self.session_states.append([
                    session.owner, list(session.kind), session.num_head_blocks, session.num_shared_blocks, session.name,
                    session.is_final, last,
                ])  # fmt: skip

    def _number(self, one: _T, known: list[_T]) -> int:
        number = self._numbers.get(id(one))
        if number is None:
            number = self._numbers[id(one)] = len(known)
            known.append(one)
        return number
