"""A log whose results depend on other weights from some point on."""

from __future__ import annotations

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log import LogHeader, RecordedRun, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig
from llmstack_step_log.records import NumericsChanged, RequestAdded
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams

FIRST, SECOND = ({"numeric_contract": name, "backends": {"weights": name}} for name in "ab")
HEADER = LogHeader.of(SchedulerConfig(max_num_seqs=3), CacheConfig(7, 8), {}, b"", FIRST)


def numerics_of(run: RecordedRun) -> dict[str, object]:
    """Request to what its results depend on."""
    now, found = run.header.numerics, {}
    for event in run.events():
        if isinstance(event, NumericsChanged):
            now = event.numerics
        elif isinstance(event, RequestAdded):
            found[event.request.request_id] = now
    return found


def log_of(max_bytes: int, num_requests: int) -> RingSink:
    """Half of the requests come before the change."""
    sink = RingSink(max_bytes)
    log = StepLog(HEADER, sink)
    for number in range(num_requests):
        if number == num_requests // 2:
            log.change_numerics(SECOND)
        log.add_request(EngineCoreRequest(f"r{number}", [1, 2, 3], SamplingParams(temperature=0.0)))
        log.checkpoint()
    return sink


def test_each_request_has_the_numerics_of_its_time() -> None:
    run = RecordedRun(log_of(1 << 20, 6).dump())
    assert numerics_of(run) == {f"r{number}": FIRST if number < 3 else SECOND for number in range(6)}
    assert verify(run)


@pytest.mark.parametrize("max_bytes", [300, 600, 900, 1200])
def test_a_ring_that_has_dropped_the_change_begins_with_what_came_after(max_bytes: int) -> None:
    found = numerics_of(RecordedRun(log_of(max_bytes, 20).dump()))
    assert 0 < len(found) < 20
    assert found == {name: FIRST if int(name[1:]) < 10 else SECOND for name in found}
