"""Writer of step logs.

Inputs of the scheduler as they come, and the hash of its decisions at checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from llmstack_step_log.decisions import DecisionHash, pack_scheduled, pack_updated
from llmstack_step_log.encoding import (
    encode_forked,
    encode_header,
    encode_imported,
    encode_mark,
    encode_scheduled,
    encode_updated,
    put_checkpoint,
    put_record,
)
from llmstack_step_log.header import LogHeader
from llmstack_step_log.packing import pack
from llmstack_step_log.records import Checkpoint, Tag
from llmstack_step_log.request_fields import pack_request
from llmstack_step_log.sinks import Sink
from llmstack_step_log.snapshot_writer import SnapshotWriter
from llmstack_step_log.snapshots import State
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, PrefixMedia, SchedulerOutput
from llmstack_types.media import NO_MEDIA

# A checkpoint takes about 30 bytes, so this adds half a byte per step; a killed process loses what came after the last.
STEPS_PER_CHECKPOINT = 64
MAX_SEGMENT_BYTES = 1 << 16


class Follower(Protocol):
    """Receives a log while it is written."""

    def take(self, segment: bytes, decisions: list[bytes], start_us: int) -> None:
        """A segment, what was decided in it, and the time of the last event before it. Returns at once."""
        ...


class _KeptDecisions(DecisionHash):
    """A running hash that also keeps what it takes in, up to the next checkpoint."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []

    def add(self, packed: bytes) -> None:
        """Takes in one decision."""
        super().add(packed)
        self.kept.append(packed)


class StepLog:
    """One run's log. Used by one thread, the engine core's.

    An input is written even if the scheduler fails with it: the log of a crash ends with what caused it.

    Attributes:
        decisions: The hash of what the scheduler decides.
        snapshot_steps: Steps between two snapshots; 0 if there are none.
    """

    def __init__(
        self, header: LogHeader, sink: Sink, follower: Follower | None = None, snapshot_steps: int = 0
    ) -> None:
        """`follower`: Receives the log too, without its header and its snapshots.

        `snapshot_steps`: Steps between two snapshots, which need a marker in the header; 0 writes none.
        """
        self.sink = sink
        self._take_state: Callable[[], State] | None = None
        self._marker = header.marker
        self.snapshot_steps = snapshot_steps if header.marker else 0
        self._snapshots = SnapshotWriter(header.marker) if self.snapshot_steps else None
        self.decisions = DecisionHash() if follower is None else _KeptDecisions()
        self._follower: Follower | None = None  # not of the header
        self._start_us = 0
        self._header, self._segment = header, encode_header(header)
        self._num_steps = self._num_marked_steps = 0
        self._last_us = 0
        self._is_closed = False
        self.checkpoint()
        self._follower = follower

    def snapshots_from(self, take_state: Callable[[], State]) -> None:
        """Lets snapshots copy the state of the control plane with `take_state`; without it there are none."""
        self._take_state = take_state

    def add_request(self, request: EngineCoreRequest) -> None:
        """Logs a new request."""
        self.put(Tag.ADD, pack_request(request))

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> None:
        """Logs a fork of a running request."""
        self.put(Tag.FORK, encode_forked(parent_id, child))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Logs that requests are aborted."""
        put_record(self._segment, Tag.ABORT, pack(request_ids))

    def reset_prefix_cache(self) -> None:
        """Logs a reset of the prefix cache."""
        put_record(self._segment, Tag.RESET_PREFIX_CACHE, b"")

    def release_sessions(self, tenant: str, name: str) -> None:
        """Logs that sessions are given up."""
        self.put(Tag.RELEASE, pack([tenant, name]))

    def change_numerics(self, numerics: Mapping[str, Any]) -> None:
        """Logs that results depend on other weights from now on, which also holds for a log that begins later."""
        self.put(Tag.NUMERICS, pack(dict(numerics)))
        self.checkpoint()
        self._header = replace(self._header, numerics=numerics)
        segment = encode_header(self._header)
        put_checkpoint(segment, Checkpoint(0, DecisionHash().digest()))
        self.sink.change_header(bytes(segment))

    def import_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia = NO_MEDIA) -> None:
        """Logs that another engine core's blocks become findable."""
        self.put(Tag.IMPORT_WITH_MEDIA if media.items else Tag.IMPORT, encode_imported(token_ids, salt, media))

    def step(self, now_us: int, scheduled: SchedulerOutput) -> None:
        """Logs a call for the next step, and the scheduled step."""
        self.schedule(now_us)
        self.scheduled(scheduled)

    def result(
        self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str],
        outputs: EngineCoreOutputs,
    ) -> None:  # fmt: skip
        """Logs the results of the step `lag` steps before the last one, and its outputs."""
        self.update(now_us, lag, sampled_token_ids, errors)
        self.updated(outputs)

    def schedule(self, now_us: int) -> None:
        """Logs a call for the next step."""
        if self._num_steps % STEPS_PER_CHECKPOINT == 0 and self._num_steps != self._num_marked_steps:
            self.checkpoint()
        self._num_steps += 1
        put_record(self._segment, Tag.SCHEDULE, encode_scheduled(now_us, self._last_us))
        self._last_us = now_us

    def scheduled(self, scheduled: SchedulerOutput) -> None:
        """Logs the scheduled step."""
        self.decide(pack_scheduled(scheduled))

    def update(self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str]) -> None:
        """Logs the results of the step `lag` steps before the last one."""
        payload = encode_updated(now_us, self._last_us, lag, sampled_token_ids, errors)
        put_record(self._segment, Tag.UPDATE, payload)
        self._last_us = now_us

    def updated(self, outputs: EngineCoreOutputs) -> None:
        """Logs the outputs of a step."""
        self.decide(pack_updated(outputs))

    def decide(self, packed: bytes) -> None:
        """Adds a decision to the hash."""
        self.decisions.add(packed)

    def flush(self) -> None:
        """Hands over what is not yet in the sink; for moments when there is nothing else to do."""
        if self._segment:
            self.checkpoint()

    def checkpoint(self, is_closed: bool = False) -> None:
        """Ends a segment and hands it over."""
        checkpoint = Checkpoint(self._num_steps, self.decisions.digest(), is_closed)
        put_checkpoint(self._segment, checkpoint)
        segment = bytes(self._segment)
        self.sink.write(segment, checkpoint)
        if self._follower is not None and isinstance(self.decisions, _KeptDecisions):
            decided, self.decisions.kept = self.decisions.kept, []
            self._follower.take(segment, decided, self._start_us)
        self._start_us = self._last_us
        self._segment.clear()
        if self._snapshots is not None:
            self._write_snapshot(self._snapshots.take())

    def mark(self) -> None:
        """Begins a segment with a mark and a hash that starts again, and takes the snapshot of this moment.

        Called before every `snapshot_steps`-th step, the first one left out.
        """
        if self._snapshots is None:
            return
        self.checkpoint()
        self._num_marked_steps = self._num_steps
        digest = self.decisions.digest()
        self.decisions.restart()
        put_record(self._segment, Tag.MARK, encode_mark(self._marker, self._num_steps))
        if self._take_state is not None:
            self._snapshots.begin(self._num_steps, self._last_us, digest, self._take_state)

    def _write_snapshot(self, payload: bytes | None) -> None:
        """A segment of its own, which no follower needs."""
        if payload is None:
            return
        segment = bytearray()
        put_record(segment, Tag.SNAPSHOT, payload)
        checkpoint = Checkpoint(self._num_steps, self.decisions.digest())
        put_checkpoint(segment, checkpoint)
        self.sink.write(bytes(segment), checkpoint)

    def put(self, tag: Tag, payload: bytes | bytearray) -> None:
        """Appends an encoded record, in the next segment where this one is full."""
        if len(self._segment) > MAX_SEGMENT_BYTES:
            self.checkpoint()
        put_record(self._segment, tag, payload)

    def close(self) -> None:
        """Ends the log in good order. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._snapshots is not None:
                payload = self._snapshots.close()
                self.checkpoint()
                self._write_snapshot(payload)
            self.checkpoint(is_closed=True)
            self.sink.close()
