"""Ranks as processes: one start for several tests, and the loss of one of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from parallel_helpers.families import write_family
from parallel_helpers.schedules import NUM_BLOCKS, make_config

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_parallel import runner as runner_module
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.launcher import ProcessPeers
from llmstack_parallel.peers import start_peers, states_bytes
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EngineStartError, ModelRunnerConfig, SamplingParams


class Started:
    """A runner over two processes, with the processes."""

    def __init__(self, config: ModelRunnerConfig, backend: str | None = None) -> None:
        self.processes: list[ProcessPeers] = []
        self.backend = backend
        self.runner = ParallelRunner(config, self._start)
        self.runner.load_model()
        self.runner.initialize_kv_cache(NUM_BLOCKS)

    def _start(self, config: ModelRunnerConfig) -> ProcessPeers:
        made = start_peers(config) if self.backend is None else ProcessPeers(config, self.backend, states_bytes(config))
        self.processes.append(made)
        return made


def greedy(runner: ModelRunner | ParallelRunner, num_tokens: int = 12) -> list[int]:
    driver = StepDriver(runner, NUM_BLOCKS)  # type: ignore[arg-type]  # it calls what both have
    driver.add("request", [5, 9, 30, 2, 77], SamplingParams(temperature=0.0))
    tokens = driver.run(num_tokens)["request"]
    driver.remove("request")
    driver.step({})
    return tokens


def alone(config: ModelRunnerConfig) -> list[int]:
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return greedy(runner)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Started]:
    started = Started(make_config(folder, tensor_parallel_size=2))
    yield started
    started.runner.shutdown()


def test_two_processes_give_the_tokens_of_one(started: Started, folder: Path) -> None:
    assert greedy(started.runner) == alone(make_config(folder))
    backends = started.runner.backends()
    assert backends["ranks"] == "2 per stage, 1 stages, SharedMemoryExchange"
    assert backends["numeric_contract"].endswith("(tensor_parallel_size 2)")


def test_all_ranks_load_weights_and_allocate_storage_again_after_sleep(started: Started) -> None:
    before = greedy(started.runner)
    started.runner.sleep(2)
    started.runner.wake_up()
    assert greedy(started.runner) == before


def test_the_name_of_a_process_says_rank(started: Started) -> None:
    (pid,) = started.processes[0].pids().values()
    assert b"llmstack_parallel.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_rank_that_is_killed_ends_the_engine_core_and_is_no_error_of_a_request(started: Started) -> None:
    """The last test with these processes."""
    (pid,) = started.processes[0].pids().values()
    driver = StepDriver(started.runner, NUM_BLOCKS)  # type: ignore[arg-type]
    driver.add("request", [5, 9, 30], SamplingParams(temperature=0.0))
    driver.run(2)
    started.runner.check_processes()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostRankError, match="rank 1 of 2"):
        driver.run(50)
    assert driver.errors == {}
    with pytest.raises(LostRankError, match="rank 1 of 2"):
        started.runner.check_processes()
    started.runner.shutdown()
    with pytest.raises(LostRankError, match="not started"):
        greedy(started.runner)


class SilentPeers:
    """A rank that takes calls and answers none."""

    epoch = 1

    def __init__(self) -> None:
        self.channels, self.exchange, self.was_aborted = {1: self}, self, False
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        return None

    def abort(self) -> None:
        self.was_aborted = True

    def set_timeout(self, timeout_s: float) -> None: ...

    def lost(self) -> str | None:
        return None


def test_a_rank_that_answers_no_call_is_lost_after_a_time_and_gets_no_other_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "START_TIMEOUT_S", 0.01)
    runner, peers, calls = ParallelRunner(make_config(folder, tensor_parallel_size=2)), SilentPeers(), []
    runner._peers, runner._runner = peers, SimpleNamespace(sleep=calls.append)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(LostRankError, match=r"^rank 1 of 2 .*has not answered a call within 0.01 s$"):
            runner.sleep(1)
    assert (calls, len(peers.sent), peers.was_aborted) == ([1], 1, True)


@pytest.mark.full
def test_a_rank_that_is_stopped_before_a_call_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(make_config(folder, tensor_parallel_size=2))
    (pid,) = started.processes[0].pids().values()
    monkeypatch.setattr(runner_module, "START_TIMEOUT_S", 1.0)
    try:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LostRankError, match="has not answered a call within 1 s"):
            started.runner.available_kv_bytes()
    finally:
        started.runner.shutdown()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.full
def test_a_rank_that_is_stopped_is_noticed_by_the_deadline_of_a_step(folder: Path) -> None:
    started = Started(make_config(folder, pipeline_parallel_size=2, rank_timeout_s=1.0))
    try:
        (pid,) = started.processes[0].pids().values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LostRankError, match="does not answer"):
            greedy(started.runner)
    finally:
        started.runner.shutdown()


ENGINE_CORE = """
import sys
from pathlib import Path
from llmstack_parallel.runner import ParallelRunner
from parallel_helpers.schedules import make_config
runner = ParallelRunner(make_config(Path(sys.argv[1]), tensor_parallel_size=2))
runner.load_model()
print(*runner._peers.pids().values(), flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_a_rank_that_is_stopped_ends_with_an_engine_core_that_is_killed(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENGINE_CORE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as engine_core:
        assert engine_core.stdout is not None
        pid = int(engine_core.stdout.readline())
        rank = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGSTOP)
            engine_core.kill()
            assert select.select([rank], [], [], 30)[0], "it has not ended"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_gloo_gives_the_same_tokens_where_memory_cannot_be_shared(sizes: tuple[int, int], folder: Path) -> None:
    config = make_config(folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    started = Started(config, "gloo")
    try:
        assert greedy(started.runner) == alone(make_config(folder))
    finally:
        started.runner.shutdown()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_a_rank_over_gloo_that_is_killed_or_stopped_is_lost(
    sizes: tuple[int, int], number: signal.Signals, folder: Path
) -> None:
    config = make_config(folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], rank_timeout_s=1.0)
    started = Started(config, "gloo")
    try:
        (pid,) = started.processes[0].pids().values()
        os.kill(pid, number)
        with pytest.raises(LostRankError, match=r"ended with status -9|does not answer"):
            greedy(started.runner)
    finally:
        started.runner.shutdown()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.full
def test_a_model_that_only_a_rank_cannot_load_is_refused_with_its_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises((EngineStartError, ValueError)):
        Started(make_config(tmp_path, tensor_parallel_size=2))
