"""A replay can begin with any snapshot of a log, and decides the same as from the beginning."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from engine_core_helpers.logged_runs import LoggedRun
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import SchedulerConfig, SpeculativeConfig
from llmstack_engine_core.control_plane import CacheConfig
from llmstack_engine_core.replay import Decision, DecisionsDifferError, derive_decisions, installation, verify
from llmstack_engine_core.replay.against import decisions_against, decisions_as_recorded
from llmstack_engine_core.replay.derive import proven
from llmstack_engine_core.step_log import RecordedRun, read_step_log, snapshot_writer, snapshots
from llmstack_engine_core.step_log.encoding import MAGIC
from llmstack_engine_core.step_log.seek import LogFile, RunPart

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


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
    num_blocks=st.integers(12, 40),
    finds_prefixes=st.booleans(),
    windows=st.sampled_from([(), (), (0, 8), (6,), (5, 0, 9)]),
    num_host_blocks=st.sampled_from([0, 0, 30]),
    speculative=st.sampled_from([None, None, SpeculativeConfig("ngram", 3, 3, 1)]),
    num_under_way=st.sampled_from([1, 1, 2]),
)
def test_a_replay_from_any_snapshot_decides_as_one_from_the_beginning(
    seed: int, policy: str, num_blocks: int, finds_prefixes: bool, windows: tuple[int, ...], num_host_blocks: int,
    speculative: SpeculativeConfig | None, num_under_way: int,
) -> None:  # fmt: skip
    num_blocks *= max(1, len(windows))
    scheduler = replace(LIMITS, policy=policy, speculative=speculative)
    cache = CacheConfig(num_blocks, 4, finds_prefixes, num_host_blocks, windows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.steps"
        run = LoggedRun(path, scheduler, cache, seed, snapshot_steps=8)
        for _ in range(50):
            run.do_something(1 if speculative else num_under_way)
        run.finish()
        assert check_all_snapshots(path) == 6


def recorded(path: Path, num_calls: int = 60, cache: CacheConfig = CACHE, **settings: object) -> LoggedRun:
    run = LoggedRun(path, replace(LIMITS, policy="fair"), cache, 3, **settings)
    for _ in range(num_calls):
        run.do_something(1)
    run.finish()
    return run


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.steps"
    recorded(path)
    return path


def test_a_log_without_its_snapshots_is_one_that_older_packages_read(log_path: Path) -> None:
    run = read_step_log(log_path)
    older = run.without_snapshots()
    assert older[len(MAGIC)] == 1
    assert run.header.marker not in older
    assert list(decisions_as_recorded(RecordedRun(older))) == list(decisions_as_recorded(run))
    assert RecordedRun(older).last == run.last


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
    assert seen[0][len(MAGIC)] == 1


def test_a_log_without_snapshots_has_the_format_from_before_them(tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    recorded(path, 20, snapshot_steps=0)
    assert path.read_bytes()[len(MAGIC)] == 1
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
