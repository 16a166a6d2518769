"""Another control plane on the inputs of a live run: what it finds, what it costs, and that it has no effect."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from llmstack_core_scheduler import KVCacheManager, Scheduler, SchedulerConfig
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_insight.rerun import changed_plane, recorded_plane
from llmstack_insight.shadow import Shadow, ShadowFeed
from llmstack_insight.shadow import feed as feed_module
from llmstack_insight.shadow import shadow as shadow_module
from llmstack_insight.shadow.child import Budget, Pace
from llmstack_step_log import LoggedScheduler, LogHeader, RingSink, StepLog, make_marker
from llmstack_step_log.control_plane import CacheConfig
from llmstack_step_log.records import Tag
from llmstack_step_log.segments import segment_at
from llmstack_types import (
    EngineCoreRequest,
    EngineStartError,
    ModelRunnerConfig,
    ModelRunnerOutput,
    SamplingParams,
    ShadowReport,
)

CONFIG = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
CACHE = CacheConfig(64)
WAIT_S = 60.0


class Live:
    """A run whose steps take 10 ms and 1 ms for each token of a prompt."""

    def __init__(self, follower: Any, config: SchedulerConfig = CONFIG, snapshot_steps: int = 0) -> None:
        self.header = LogHeader.of(config, CACHE, {}, make_marker())
        self.log = StepLog(self.header, RingSink(1 << 20), follower, snapshot_steps)
        self.scheduler = LoggedScheduler(recorded_plane(config, CACHE).build(), self.log)
        self.now_s = 100.0
        self.num_added = 0

    def add(self, num_prompt: int = 20, num_output: int = 8, **values: Any) -> None:
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        name, prompt = f"r{self.num_added}", [self.num_added, *range(1, num_prompt)]
        self.num_added += 1
        self.scheduler.add_request(EngineCoreRequest(name, prompt, params, arrival_time_s=self.now_s, **values))

    def step(self) -> None:
        scheduled = self.scheduler.schedule(self.now_s)
        rows = scheduled.scheduled_requests
        num_prefill = sum(row.num_scheduled_tokens for row in rows if row.num_scheduled_tokens > 1)
        self.now_s += 0.01 + 0.001 * num_prefill if rows else 0.0
        sampled = [[5] for _ in rows]
        output = ModelRunnerOutput([row.request_id for row in rows], sampled)
        self.scheduler.update_from_output(scheduled, output, self.now_s)

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def burst(self, num_requests: int = 4, **values: Any) -> None:
        for _ in range(num_requests):
            self.add(**values)
        self.run()


def made(text: str = "max_num_seqs=4", config: SchedulerConfig = CONFIG) -> tuple[Shadow, Live]:
    plane = recorded_plane(config, CACHE)
    shadow = Shadow(text, plane, changed_plane(plane, text))
    return shadow, Live(shadow, config)


def always() -> bool:
    return True


def test_it_says_what_more_places_would_have_changed() -> None:
    shadow, live = made()
    for _ in range(10):
        live.burst()
        shadow.work(always)
    report = shadow.report(0.5)
    assert report.num_requests == 40
    assert (report.name, report.problem, report.num_shed, report.cpu_s) == ("max_num_seqs=4", "", 0, 0.5)
    # The same settings give what the run gave, so the difference of the other two is the settings' alone.
    assert report.unchanged.ttft_s == pytest.approx(report.real.ttft_s, rel=0.1)
    assert report.unchanged.queue_s == pytest.approx(report.real.queue_s, rel=0.1)
    assert report.shadow.ttft_s < 0.7 * report.unchanged.ttft_s
    assert report.recent_shadow == pytest.approx(report.shadow)


def test_it_follows_a_log_with_snapshots_without_these() -> None:
    taken: list[bytes] = []
    shadow, _ = made()

    class Following:
        def take(self, segment: bytes, decisions: list[bytes], start_us: int) -> None:
            taken.append(segment)
            shadow.take(segment, decisions, start_us)

    live = Live(Following(), snapshot_steps=5)
    for _ in range(10):
        live.burst()
        shadow.work(always)
    live.log.close()
    records = [record for segment in taken for record in (segment_at(segment, 0) or ([], 0))[0]]
    tags = {record.tag for record in records}
    assert Tag.MARK in tags
    assert Tag.SNAPSHOT not in tags
    assert live.log.sink.dump().count(live.header.marker) > 1 + sum(record.tag == Tag.MARK for record in records)
    assert shadow.report(0.0).num_requests == 40


def test_it_says_what_fewer_blocks_would_have_cost() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512)
    shadow, live = made("num_blocks=6", config)
    for _ in range(8):
        live.burst(num_prompt=16, num_output=40)
        shadow.work(always)
    report = shadow.report(0.0)
    assert report.num_requests > 0
    assert report.unchanged.num_preemptions == report.real.num_preemptions == 0
    assert report.shadow.num_preemptions > 0


def test_requests_wait_for_the_answers_of_earlier_ones_but_not_for_ever(monkeypatch: Any) -> None:
    monkeypatch.setattr(shadow_module, "MAX_HOLD_S", 5.0)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=4096)
    shadow, live = made("max_num_seqs=2", config)
    live.burst(20)
    shadow.work(always, live.now_s + 100)
    live.add(num_output=800)
    for _ in range(10):
        live.add()
        for _ in range(20):
            live.step()
    live.log.flush()
    shadow.work(always)
    before = shadow.report(0.0)
    assert (before.num_requests, before.lag_s > 0) == (20, True)
    for _ in range(400):
        live.step()
    live.log.flush()
    shadow.work(always)
    shadow.work(always)
    assert shadow.report(0.0).num_requests == 30  # without the long one


def test_what_it_has_no_time_for_is_left_out_and_counted() -> None:
    shadow, live = made()
    live.burst(12)
    shadow.work(always)
    assert shadow.report(0.0).num_requests == 12
    lost: list[Any] = []
    live.log._follower = type("Lost", (), {"take": lambda self, *values: lost.append(values)})()
    live.burst(4)
    for _ in range(3):
        live.add()
    live.step()
    live.log.flush()
    shadow.skip(64)
    live.log._follower = shadow
    live.run()
    shadow.work(always)
    after = shadow.report(0.0)
    assert after.num_shed >= 64
    assert after.num_requests == 12  # those three had begun before
    live.burst(5)
    shadow.work(always)
    shadow.work(always, live.now_s + 100)
    assert shadow.report(0.0).num_requests == 17


def test_work_ends_when_its_time_is_over() -> None:
    shadow, live = made()
    live.burst(30)
    left = iter([True, True, False])
    assert shadow.work(lambda: next(left))
    assert shadow.report(0.0).num_requests == 0
    assert shadow.behind_s > 0.5
    assert not shadow.work(always, live.now_s + 100)
    assert (shadow.report(0.0).num_requests, shadow.behind_s) == (30, 0.0)


def test_its_budget_is_a_share_of_a_core_and_it_pauses_where_that_is_too_little(monkeypatch: Any) -> None:
    times = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: times["wall"])
    monkeypatch.setattr(time, "process_time", lambda: times["cpu"])
    budget, pace = Budget(share=0.04, saved_s=1.0, max_debt_s=1.0), Pace()
    assert (budget.has_time, pace.follows(budget, 100.0)) == (True, True)  # it may catch up
    times["cpu"] = 1.5
    budget.update()
    assert (budget.has_time, budget.is_overdrawn) == (False, False)
    assert pace.follows(budget, 0.0)  # it has done all that it could
    assert not pace.follows(budget, 6.0)
    times["wall"] = 20.0
    budget.update()
    assert (budget.has_time, pace.follows(budget, 0.0)) == (True, False)  # a moment of time compares nothing
    times["wall"] = 1e6
    budget.update()
    assert pace.follows(budget, 0.0)
    times["cpu"] += 2.1  # only a second was saved
    budget.update()
    assert budget.is_overdrawn
    assert not pace.follows(budget, 0.0)


class FailingScheduler(Scheduler):
    """Fails at the first step."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        super().__init__(config, cache)

    def schedule(self, now_s: float) -> Any:
        raise RuntimeError("out of ideas")


def report_of(feed: ShadowFeed, is_wanted: Any) -> ShadowReport:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        report = feed.take_report()
        if report is not None and is_wanted(report):
            return report
        time.sleep(0.02)
    raise AssertionError("no such report came")


def test_a_process_follows_the_log_and_reports() -> None:
    feed = feed_module.start_shadow("max_num_seqs=4", LogHeader.of(CONFIG, CACHE, {}))
    try:
        live = Live(feed)
        live.burst(30)
        report = report_of(feed, lambda report: report.num_requests == 30)
        assert report.shadow.ttft_s < report.unchanged.ttft_s
        assert report.cpu_s > 0
        assert feed.take_report() is None
    finally:
        feed.close()
    assert feed._process.poll() is not None
    assert not any(thread.is_alive() for thread in feed._threads)


@pytest.mark.parametrize(
    ("name", "words"),
    [(f"{__name__}:FailingScheduler", "out of ideas"), ("no_such_module:Class", "cannot be imported")],
)
def test_a_shadow_that_fails_ends_alone_and_says_why(name: str, words: str) -> None:
    feed = feed_module.start_shadow(name, LogHeader.of(CONFIG, CACHE, {}))
    try:
        live = Live(feed)
        live.burst(30)
        assert words in report_of(feed, lambda report: report.problem).problem
        live.burst(4)  # goes on without it
    finally:
        feed.close()


def test_a_process_that_reads_nothing_loses_steps_and_delays_none(monkeypatch: Any) -> None:
    monkeypatch.setattr(feed_module, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(feed_module, "MAX_QUEUED_BYTES", 1 << 16)
    feed = feed_module.start_shadow("fair", LogHeader.of(CONFIG, CACHE, {}))
    try:
        feed.take(bytes(1 << 16), [], 0)
        for _ in range(8):
            feed.take(bytes(1 << 15), [], 0)
        with feed._has_work:
            assert feed._num_lost_steps > 0
            assert feed._num_queued_bytes <= 1 << 16
    finally:
        feed.close()
    feed.take(b"", [], 0)  # after the end nothing is kept
    assert not feed._queue or feed._num_queued_bytes <= 1 << 16


def engine_config(**changes: Any) -> EngineConfig:
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    model = ModelRunnerConfig("echo", block_size=4, **limits)
    return EngineConfig(model, runner="echo", scheduler=SchedulerConfig(**limits), num_blocks=32, **changes)


def test_an_engine_core_has_the_same_outputs_with_a_shadow_that_fails() -> None:
    def run(**changes: Any) -> list[Any]:
        core, outputs = build_engine_core(engine_config(**changes)), []
        for number in range(6):
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            core.add_request(EngineCoreRequest(f"r{number}", [1, 2, number], params))
        while core.has_unfinished_requests():
            outputs += core.step().outputs
        core.shutdown()
        return outputs

    alone = run()
    assert run(shadow_scheduler=f"{__name__}:FailingScheduler", step_log_bytes=0) == alone


@pytest.mark.parametrize("text", ["fastest", "max_num_seqs=0", "max_rows=3", "module:"])
def test_a_wrong_shadow_ends_the_start_with_one_line(text: str) -> None:
    with pytest.raises(EngineStartError, match="--shadow-scheduler: ") as raised:
        build_engine_core(engine_config(shadow_scheduler=text))
    assert "\n" not in str(raised.value)
