"""Processes of a server are killed or stopped at random points; it goes on or ends, and leaves nothing either way."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

import llmstack_demo_model
from llmstack_kernels import native

MODULES = {
    "engine core": "llmstack_engine_core.process",
    "API process": "llmstack_server.serving.api_worker",
    "rank": "llmstack_parallel.rank",
}
DRAWN = ("engine core", "API process")  # ranks exist with `-tp` only, and start slowly
PHASES = ("start", "ready", "drain")
ASKED: dict[str, Any] = {
    "model": "llmstack-demo", "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True},
}  # fmt: skip
# The grace of a process that does not end: that of its drain, and ten seconds.
END_S = 90.0


@dataclass(frozen=True)
class Fault:
    """What happens to which process, and when: so many seconds after the phase has begun.

    Attributes:
        after: What is in the log when it begins; empty where the test itself begins the phase.
        prompt: What the streams beside it are asked.
    """

    phase: str
    victim: str
    number: signal.Signals
    delay_s: float
    after: str = ""
    prompt: str = "Once upon a time"


RANK_FAULTS = {
    "loading": Fault("start", "rank", signal.SIGKILL, 0.0),
    "warm-up": Fault("start", "rank", signal.SIGKILL, 0.0, after="they exchange data by"),
    "prefill": Fault("ready", "rank", signal.SIGKILL, 0.05, prompt="Once " * 200),
    "decode": Fault("ready", "rank", signal.SIGKILL, 0.05),
    "drain": Fault("drain", "rank", signal.SIGKILL, 0.05),
}


def draw_fault(seed: int) -> Fault:
    draw = random.Random(seed)
    phase, victim = PHASES[seed % 3], draw.choice(DRAWN)
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    return Fault(phase, victim, number, draw.uniform(0.0, 1.5 if phase == "start" else 0.3))


@pytest.fixture
def echo_arguments(tmp_path: Path) -> list[str]:
    """A model that starts at once and takes five milliseconds a token."""
    folder = tmp_path / "echo?step_delay_s=0.005"
    folder.symlink_to(llmstack_demo_model.model_path())
    return [str(folder), "--runner", "echo", "--served-model-name", "llmstack-demo"]


def family_of(server: Any) -> list[psutil.Process]:
    try:
        return list(psutil.Process(server.process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def strike(server: Any, fault: Fault) -> bool:
    """Signals a process of the kind, once there is one; False if the server has ended before."""
    while fault.after not in server.log and server.process.poll() is None:
        time.sleep(0.01)
    time.sleep(fault.delay_s)
    while server.process.poll() is None:
        for child in family_of(server):
            try:
                if MODULES[fault.victim] in child.cmdline():
                    child.send_signal(fault.number)
                    return True
            except psutil.Error:  # it has ended between two looks
                continue
        if fault.phase == "drain":
            return False  # it may have ended already, and is not replaced
        time.sleep(0.01)
    return False


def read_stream(server: Any, prompt: str) -> str:
    """The text of a stream; `lost` where its API process went away, or stands still."""
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            chunks = list(client.completions.create(**ASKED, prompt=prompt, stream=True))
    except (openai.APIError, httpx.TransportError):
        return "lost"
    return "".join(chunk.choices[0].text for chunk in chunks)


def serves_again(server: Any, prompt: str, expected: str) -> bool:
    """Whether several requests in a row are answered, as they were before."""
    answers = [read_stream(server, prompt) for _ in range(3)]
    assert set(answers) <= {expected, "lost"}
    return answers == [expected] * 3


def check_fault(server: Any, fault: Fault, runtime_folder: Path) -> None:
    """Runs a server through its phases with one fault in one of them."""
    family: set[psutil.Process] = set()
    if fault.phase == "start":
        strike(server, fault)
        family.update(family_of(server))
        if fault.number == signal.SIGKILL:
            # A server whose engine core is killed before it has served ends; else it is ready, with a replacement.
            while "is ready on" not in server.log and server.process.poll() is None:
                time.sleep(0.05)
    if fault.phase != "start" or "is ready on" in server.log:
        server.wait_until_ready()
    if server.url and server.process.poll() is None and fault.phase != "start":
        # A step larger than any before may take as long as a start, so one is measured first.
        server.client.completions.create(**{**ASKED, "max_tokens": 2}, prompt="Once " * 200)
        expected = read_stream(server, fault.prompt)
        assert expected != "lost"
        with ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(read_stream, server, fault.prompt) for _ in range(4)]
            family.update(family_of(server))
            if fault.phase == "drain":
                server.process.send_signal(signal.SIGTERM)
            strike(server, fault)
            answers = {read.result() for read in reads}
        assert answers <= {expected, "lost"}
        if fault.phase == "ready":
            if fault.victim != "API process":
                assert answers == {expected}, "an engine core costs a pause, and no stream"
            if (fault.victim, fault.number) != ("API process", signal.SIGSTOP):
                server.wait_for(lambda: serves_again(server, fault.prompt, expected), "answers as before")
    family.update(family_of(server))
    if server.process.poll() is None and fault.phase != "drain":
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_S) in (0, 1)
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert list(runtime_folder.iterdir()) == []
    assert "Traceback" not in server.log


@pytest.fixture
def start(launch: Callable[..., Any], runtime_folder: Path) -> Callable[..., Any]:
    def start_server(*arguments: str) -> Any:
        limits = ("--engine-hang-timeout", "3", "--shutdown-timeout", "3")
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime_folder)}
        return launch(*arguments, *limits, env=environment)

    return start_server


@pytest.fixture
def start_ranks(start: Callable[..., Any]) -> Callable[[], Any]:
    # Small steps, and no prefixes of earlier requests: so a prompt is prefilled for a while.
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--no-enable-prefix-caching")
    model = (str(llmstack_demo_model.model_path()), "--served-model-name", "llmstack-demo")
    return lambda: start(*model, "-tp", "2", *limits)


@pytest.mark.full
def test_a_process_that_is_killed_at_a_random_point_leaves_a_server_that_serves_or_has_ended(
    start: Callable[..., Any], echo_arguments: list[str], runtime_folder: Path
) -> None:
    server = start(*echo_arguments, "--api-server-count", "2")
    check_fault(server, Fault("drain", "engine core", signal.SIGKILL, 0.05), runtime_folder)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(30))
def test_each_phase_with_each_fault(
    start: Callable[..., Any], echo_arguments: list[str], runtime_folder: Path, seed: int
) -> None:
    server = start(*echo_arguments, "--api-server-count", "2")
    check_fault(server, draw_fault(seed), runtime_folder)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(native.library() is None, reason="texts that go on as they were need the native kernels")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("moment", RANK_FAULTS)
def test_a_rank_that_is_killed_or_stopped_leaves_a_server_that_serves_or_has_ended(
    start_ranks: Callable[[], Any], runtime_folder: Path, moment: str, number: signal.Signals
) -> None:
    check_fault(start_ranks(), replace(RANK_FAULTS[moment], number=number), runtime_folder)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_end_with_an_engine_core_that_is_killed_in_its_start(
    start_ranks: Callable[[], Any], runtime_folder: Path
) -> None:
    check_fault(start_ranks(), Fault("start", "engine core", signal.SIGKILL, 1.0), runtime_folder)
