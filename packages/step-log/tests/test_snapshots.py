"""A replay can begin with any snapshot of a log, and decides the same as from the beginning."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_log_helpers.logged_runs import LoggedRun, ended_requests, write_long_log

from llmstack_core_scheduler import SchedulerConfig, SpeculativeConfig, prompt_lookups
from llmstack_core_scheduler import scheduler as scheduler_module
from llmstack_step_log import RecordedRun, StepLogError, read_step_log, seek, snapshot_writer, snapshots
from llmstack_step_log.control_plane import CacheConfig, GroupConfig, build_scheduler
from llmstack_step_log.encoding import FORMAT_VERSION, MAGIC
from llmstack_step_log.records import Tag
from llmstack_step_log.replay import (
    Decision,
    DecisionsDifferError,
    derive_decisions,
    installation,
    verify,
)
from llmstack_step_log.replay.against import decisions_against, decisions_as_recorded
from llmstack_step_log.replay.derive import proven
from llmstack_step_log.seek import LogFile, RunPart
from llmstack_types import MediaSpec

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, fair_quantum=16, max_loras=1)
CACHE = CacheConfig(24, block_size=4)


def decisions_from(part: RunPart | RecordedRun) -> list[Decision]:
    start = part.start
    scheduler = part.header.build_scheduler() if start is None else start.build_scheduler(part.header)
    return list(proven(derive_decisions(part.events(), scheduler, start), start))


def check_all_snapshots(path: Path) -> int:
    run = read_step_log(path)
    assert verify(run).digest == run.last.digest.hex()
    whole = decisions_from(run)
    file = LogFile(path)
    for num_steps in file.snapshot_steps:
        part = decisions_from(file.part_at(num_steps))
        assert part
        assert part == whole[-len(part) :]
        assert len(part) < len(whole)
    file.close()
    return len(file.snapshot_steps)


def check_scenario(
    seed: int, policy: str, num_blocks: int, finds_prefixes: bool, groups: tuple[GroupConfig, ...],
    num_host_blocks: int, speculative: SpeculativeConfig | None, num_under_way: int, media: MediaSpec | None,
) -> None:  # fmt: skip
    num_under_way = 1 if speculative else num_under_way
    num_stages = 3 if num_under_way == 3 else 1
    scheduler = replace(LIMITS, policy=policy, speculative=speculative, pipeline_parallel_size=num_stages)
    scheduler = replace(scheduler, media=media, encoder_cache_tokens=9, encoder_budget_units=7)
    cache = CacheConfig(num_blocks * max(1, len(groups)), 4, finds_prefixes, num_host_blocks, groups)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.steps"
        run = LoggedRun(path, scheduler, cache, seed, snapshot_steps=8)
        for _ in range(50):
            run.do_something(num_under_way)
        run.finish()
        assert check_all_snapshots(path) == 6


SCENARIOS = given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
    num_blocks=st.integers(12, 40),
    finds_prefixes=st.booleans(),
    groups=st.sampled_from(
        [
            (),
            (),
            tuple(GroupConfig(sliding_window=window) for window in (0, 8)),
            (GroupConfig("window", 6),),
            tuple(GroupConfig(sliding_window=window) for window in (5, 0, 9)),
            (GroupConfig(), GroupConfig("state", num_blocks=9)),
        ]
    ),
    num_host_blocks=st.sampled_from([0, 0, 30]),
    speculative=st.sampled_from([None, None, SpeculativeConfig("ngram", 3, 3, 1)]),
    num_under_way=st.sampled_from([1, 1, 2, 3]),
    media=st.sampled_from([None, MediaSpec(8, {"image": 3}, max_num_tokens={"image": 4})]),
)

test_a_replay_from_any_snapshot_decides_as_one_from_the_beginning = settings(max_examples=12)(SCENARIOS(check_scenario))
test_a_replay_from_any_snapshot_of_many_runs = pytest.mark.full(settings(max_examples=200)(SCENARIOS(check_scenario)))


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_with_eviction_by_sessions_decides_the_same(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    run = LoggedRun(path, LIMITS, replace(CACHE, session_eviction=True), seed, snapshot_steps=8)
    for _ in range(80):
        run.do_something(1)
    run.finish()
    assert run.scheduler._scheduler.kv_cache_manager.sessions.num_turns > 5
    assert check_all_snapshots(path) > 6


def recorded(path: Path, num_calls: int = 60, cache: CacheConfig = CACHE, **settings: object) -> LoggedRun:
    run = LoggedRun(path, replace(LIMITS, policy="fair"), cache, 3, **settings)
    for _ in range(num_calls):
        run.do_something(1)
    run.finish()
    return run


def test_a_replay_from_a_snapshot_goes_on_with_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are looked up by a block per step."""
    monkeypatch.setattr(scheduler_module, "LONG_PROMPT_TOKENS", 1)
    for name in ("_MAX_STEP_BLOCKS", "_MIN_PIECE_BLOCKS"):
        monkeypatch.setattr(prompt_lookups, name, 1)
    states: list[list[tuple[str, list[str]]]] = []
    of_lookups = prompt_lookups.PromptLookups.state

    def state(lookups: prompt_lookups.PromptLookups) -> list[tuple[str, list[str]]]:
        states.append(of_lookups(lookups))
        return states[-1]

    monkeypatch.setattr(prompt_lookups.PromptLookups, "state", state)
    for seed in range(4):
        path = tmp_path / f"{seed}.steps"
        run = LoggedRun(path, replace(LIMITS, policy="fair"), CacheConfig(40, 4), seed, snapshot_steps=8)
        for _ in range(60):
            run.do_something(1)
        run.finish()
        assert check_all_snapshots(path)
    assert sum(map(bool, states)) > 3


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.steps"
    recorded(path)
    return path


def test_a_log_without_its_snapshots_is_a_whole_log(log_path: Path) -> None:
    run = read_step_log(log_path)
    without = run.without_snapshots()
    assert without[len(MAGIC)] == FORMAT_VERSION
    assert run.header.marker not in without
    assert list(decisions_as_recorded(RecordedRun(without))) == list(decisions_as_recorded(run))
    assert RecordedRun(without).last == run.last


def test_a_comparison_with_another_installation_leaves_snapshots_out(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    def run_child(path: Path, found: list[str]) -> Iterator[Decision]:
        seen.append(path.read_bytes())
        yield from ()

    monkeypatch.setattr(installation, "_run_child", run_child)
    checkout = Path(__file__).parents[3]
    assert not list(decisions_against(read_step_log(log_path), log_path, str(checkout)))
    assert not RecordedRun(seen[0]).header.marker


def test_a_run_without_snapshots_has_a_log_without_them(tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    recorded(path, 20, snapshot_steps=0)
    assert not read_step_log(path).header.marker
    assert LogFile(path).snapshot_steps == []
    assert verify(read_step_log(path)).num_steps == 20


def test_a_replay_proves_the_state_of_each_snapshot(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_step_log(log_path)
    verify(run)
    monkeypatch.setattr(RecordedRun, "_with_digest", lambda run, event: replace(event, state_digest=bytes(16)))
    with pytest.raises(DecisionsDifferError, match="the state at step 8 is not that of the recorded snapshot"):
        verify(run)


def test_a_state_that_is_too_large_has_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshots, "MAX_REQUESTS", 0)
    path = tmp_path / "run.steps"
    recorded(path)
    assert LogFile(path).snapshot_steps == []
    assert verify(read_step_log(path)).num_steps == 60
    assert [record.message for record in caplog.records if "lacks a snapshot" in record.message] != []


def test_a_snapshot_that_comes_too_soon_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "ThreadPoolExecutor", SlowThread)
    path = tmp_path / "run.steps"
    run = recorded(path, is_waited_for=False)
    assert run.log._snapshots is not None
    assert run.log._snapshots.num_left_out == 6
    assert LogFile(path).snapshot_steps == [8]
    check_all_snapshots(path)


class SlowThread:
    """Encodes only once the log is closed."""

    def __init__(self, *arguments: object, **named: object) -> None:
        self.left: list[tuple[Future[bytes], Callable[..., bytes], tuple[object, ...]]] = []

    def submit(self, call: Callable[..., bytes], *arguments: object) -> Future[bytes]:
        future: Future[bytes] = Future()
        self.left.append((future, call, arguments))
        return future

    def shutdown(self, wait: bool) -> None:
        for future, call, arguments in self.left:
            future.set_result(call(*arguments))


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.steps"
    write_long_log(path, replace(LIMITS, policy="fair"), CACHE)
    return path


def test_what_lies_across_two_reads_is_found(long_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, name = LogFile(long_log), ended_requests(long_log)[-1]
    monkeypatch.setattr(seek, "_CHUNK_BYTES", 61)
    parts = LogFile(long_log)
    assert parts._found == whole._found
    assert parts._find_request([name, "none"]) == parts._find_request(["none", name]) == whole._find_request([name])


def test_bytes_that_look_like_a_snapshot_are_none(long_log: Path, tmp_path: Path) -> None:
    marker = LogFile(long_log).header.marker
    path = tmp_path / "more.steps"
    false = bytes([Tag.SNAPSHOT, 20]) + marker + bytes(3) + bytes([Tag.MARK, 16]) + marker
    path.write_bytes(long_log.read_bytes() + false)
    assert LogFile(path).snapshot_steps == LogFile(long_log).snapshot_steps


def test_a_log_that_was_cut_anywhere_is_used_up_to_there(long_log: Path, tmp_path: Path) -> None:
    data, path = long_log.read_bytes(), tmp_path / "cut.steps"
    steps = LogFile(long_log).snapshot_steps
    for end in range(len(data) // 2, len(data), len(data) // 31):
        path.write_bytes(data[:end])
        found = LogFile(path).snapshot_steps
        assert found == steps[: len(found)]
        assert len(decisions_from(LogFile(path).part_at(found[-2]))) > 10


def test_a_state_that_these_packages_do_not_know_is_no_snapshot(long_log: Path) -> None:
    part = LogFile(long_log).part_at(160)
    assert part.start is not None
    state = part.start.state
    made_by = "the snapshot at step 160 cannot be restored: .*; it was made by packages that it does not name"
    for changed in (
        state._replace(cache={**state.cache, "blocks": [1, 1, 1]}),
        state._replace(cache={}),
        state._replace(cache={**state.cache, "tables": [("r1", [None])]}),
        state._replace(scheduler={**state.scheduler, "queue": 7}),
        state._replace(under_way=[(1, 2)]),
    ):
        with pytest.raises(StepLogError, match=made_by):
            replace(part.start, state=changed).build_scheduler(part.header)
    other = replace(part.start, state=state._replace(scheduler={**state.scheduler, "num_forks": 77}))
    with pytest.raises(StepLogError, match="the snapshot at step 160 is not what was recorded"):
        other.build_scheduler(part.header)


@pytest.mark.parametrize("change", [lambda data: data[:60], lambda data: data[:-1], lambda data: data[:-9] + bytes(9)])
def test_a_snapshot_that_is_not_whole_cannot_be_read(change: Callable[[bytes], bytes]) -> None:
    run = build_scheduler(LIMITS, CACHE)
    payload = snapshots.encode_snapshot(bytes(16), 8, 9, bytes(16), snapshots.take_state(run, {}))
    assert snapshots.read_snapshot(payload).place.num_steps == 8
    with pytest.raises(StepLogError):
        snapshots.read_snapshot(change(payload))
