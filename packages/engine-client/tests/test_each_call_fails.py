"""A fixed workload in which the k-th call that can fail does fail, for every k.

Calls that can fail: blocks of the cache, the computation of a step and of a row, the encoding of a message, the
socket, and the file of the step log. After each failure nothing is left, and the other requests have their tokens.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_core_helpers.messages import decode_engine_message, encode

from llmstack_core_scheduler import CheapestPreemption
from llmstack_engine_client.recovery.journal import Journal
from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core, engine_core_proc
from llmstack_engine_core.engine_core_proc import EngineCoreProc
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import AbortRequests, EngineFailed, Hello
from llmstack_engine_core.testing import EchoModelRunner, EchoOutput
from llmstack_kv_cache import KVCacheManager
from llmstack_step_log import sinks
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, ModelRunnerConfig, SamplingParams, SchedulerOutput

NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_STEPS = 14, 8, 400
LIMITS = {"max_model_len": 32, "max_num_seqs": 6, "max_num_batched_tokens": 24}
KINDS = {"blocks", "row", "step", "encode", "send", "write"}


class Faults:
    """Counts the calls that can fail; the one with the given number, counted from 1, does."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.kinds: list[str] = []
        self.failed_row = ""

    def now(self, kind: str) -> bool:
        self.kinds.append(kind)
        return len(self.kinds) == self.number

    @property
    def failed(self) -> str:
        return self.kinds[self.number - 1] if 0 < self.number <= len(self.kinds) else ""


@dataclass
class Client:
    """One client of the engine core, with its journal, as `RecoveringClient` has it."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    is_lost: bool = False
    num_failures: int = 0

    def receive(self, frame: bytes) -> None:
        message = decode_engine_message(frame)
        self.num_failures += isinstance(message, EngineFailed)
        if not isinstance(message, EngineCoreOutputs):
            return
        self.journal.note(message.outputs)
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason.value, output.error)


class Loop(EngineCoreProc):
    """The loop of an engine core's process over clients in memory."""

    def __init__(self, core: EngineCore, clients: dict[bytes, Client], faults: Faults) -> None:
        EngineLoop.__init__(self, core)
        self._socket = self  # type: ignore[assignment]  # it sends as one
        self._progress, self._num_refused, self._epoch, self._gone = None, 0, 0, set()
        self.clients, self.faults = clients, faults
        for name, client in clients.items():
            if not client.is_lost:
                self._receive_frames(name, [encode(Hello())])

    def send(self, frame: bytes, flags: int = 0) -> None:
        if flags & zmq.SNDMORE:
            self.receiver = self.clients[frame]
            if self.faults.now("send"):
                self.receiver.is_lost = True
                raise zmq.ZMQError(errno.EAGAIN)
        else:
            self.receiver.receive(frame)

    def step(self) -> None:
        try:
            self._send_outputs(self._core.step())
        except Exception as error:
            self._broadcast(EngineFailed(type(error).__name__))
            raise


def build(folder: Path, is_async: bool) -> EngineCore:
    config = EngineConfig(
        ModelRunnerConfig("echo?vocab_size=99", block_size=4, **LIMITS), runner="echo",  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**LIMITS), num_blocks=NUM_BLOCKS,  # type: ignore[arg-type]
        num_host_blocks=NUM_HOST_BLOCKS, record_steps=str(folder / "steps.log"), async_scheduling=is_async,
        log_level="CRITICAL",
    )  # fmt: skip
    return build_engine_core(config)


def workload() -> dict[int, list[tuple[bytes, EngineCoreRequest]]]:
    """Requests of two clients by their step: common prefixes, completions of one prompt, and more than fits."""
    arrivals: dict[int, list[tuple[bytes, EngineCoreRequest]]] = {}
    for number in range(9):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, number] if number % 3 else [20 + number] * 11
        params = SamplingParams(max_tokens=4 + 2 * number, seed=number, ignore_eos=True)
        request = EngineCoreRequest(f"r{number}", prompt, params)
        arrivals.setdefault(2 * (number // 3), []).append((b"ab"[number % 2 :][:1], request))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    arrivals[1] = [
        (b"a", EngineCoreRequest("fork-0", [30] * 10, params)),
        (b"a", EngineCoreRequest("fork-1", [30] * 10, params, fork_of="fork-0")),
        (b"b", EngineCoreRequest("aborted", [40] * 5, SamplingParams(max_tokens=25))),
    ]
    return arrivals


def fail_calls(patch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Puts the faults into every call that can fail."""

    has_room: list[str] = []

    def refuse(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(manager: KVCacheManager, request_id: str, *arguments: Any) -> Any:
            # The scheduler counts the room for all of a request before it swaps it in; what follows cannot fail.
            is_counted = request_id in has_room and method.__name__ == "allocate_slots"
            has_room[:] = [request_id] if method.__name__ == "swap_in" else []
            return None if not is_counted and faults.now("blocks") else method(manager, request_id, *arguments)

        return call

    for name in ("allocate_slots", "fork", "swap_in", "swap_out"):
        patch.setattr(KVCacheManager, name, refuse(getattr(KVCacheManager, name)))
    execute, write, encode_in_parts = EchoModelRunner.execute_model, os.write, engine_core_proc.encode_in_parts

    def execute_model(runner: EchoModelRunner, scheduled: SchedulerOutput, *masks: Any) -> EchoOutput:
        if faults.now("step"):
            raise RuntimeError("the step fails")
        result = execute(runner, scheduled, *masks)
        for index, request_id in enumerate(result.output.request_ids):
            if faults.now("row"):
                faults.failed_row = request_id
                result.output.errors[request_id] = "the row fails"  # type: ignore[index]  # it is a dict
                result.output.sampled_token_ids[index] = []
        return result

    def encode_or_fail(message: Any, epoch: int) -> list[bytes]:
        if isinstance(message, EngineCoreOutputs) and message.outputs and faults.now("encode"):
            raise CodecError("too large")
        return encode_in_parts(message, epoch)

    def write_or_fail(descriptor: int, data: Any) -> int:
        if faults.now("write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    patch.setattr(EchoModelRunner, "execute_model", execute_model)
    patch.setattr(engine_core_proc, "encode_in_parts", encode_or_fail)
    patch.setattr(sinks.os, "write", write_or_fail)
    # By the clock, the number of calls would be another each time.
    patch.setattr(CheapestPreemption, "prefers_swap", lambda _, num_tokens, num_blocks: num_tokens % 2 == 0)


@dataclass
class Run:
    faults: Faults
    clients: dict[bytes, Client]
    core: weakref.ref[EngineCore]
    is_async: bool


def run(folder: Path, is_async: bool, number: int = 0) -> Run:
    """The workload with one fault. A crashed engine core is replaced, and the journals say how requests go on."""
    logging.disable(logging.CRITICAL)  # the records that pytest keeps would hold exceptions, and these the engine core
    faults, arrivals, clients = Faults(number), workload(), {b"a": Client(), b"b": Client()}
    with pytest.MonkeyPatch.context() as patch:
        fail_calls(patch, faults)
        loop = Loop(build(folder, is_async), clients, faults)
        for step in range(MAX_STEPS):
            for name, request in arrivals.get(step, ()):
                if not clients[name].is_lost and clients[name].journal.add(request):
                    loop._receive_frames(name, [encode(request)])
            if step == 4 and clients[b"b"].journal.forget(["aborted"]):
                loop._receive_frames(b"b", [encode(AbortRequests(("aborted",)))])
            try:
                loop.step()
            except RuntimeError:
                assert [client.num_failures for client in clients.values()] == [1, 1]
                loop._core.shutdown()
                loop = resume(Loop(build(folder, is_async), clients, faults))
            if step > max(arrivals) and not loop._core.has_unfinished_requests():
                break
        else:
            pytest.fail(f"requests wait for ever after call {number} failed: {faults.failed}")
        check_nothing_is_left(loop)
        loop._core.shutdown()
    logging.disable(logging.NOTSET)
    return Run(faults, clients, weakref.ref(loop._core), is_async)


def resume(loop: Loop) -> Loop:
    for name, client in loop.clients.items():
        for request_id in client.journal.request_ids:
            request = client.journal.resumed(request_id)
            assert request is not None
            loop._receive_frames(name, [encode(request)])
    return loop


def check_nothing_is_left(loop: Loop) -> None:
    stats = loop._core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_waiting_tokens) == (0, 0, 0, 0)
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (stats.num_blocks, NUM_HOST_BLOCKS)
    assert not loop._request_id_to_client
    assert not loop._core._request_ids
    assert (loop._core.stages.active, loop._core.stages._ahead) == ([], {})
    assert not loop._core.runner._rows  # type: ignore[attr-defined]  # the echo runner's
    scheduler: Any = loop._core._scheduler
    scheduler._scheduler._kv_cache_manager.check_integrity()
    assert not any(len(client.journal) for client in loop.clients.values() if not client.is_lost)


def check(expected: Run, failed: Run) -> None:
    """Everything is as without the fault, but for what the failed call alone is about."""
    kind, ended = failed.faults.failed, Counter[str]()
    for name, client in failed.clients.items():
        whole = expected.clients[name]
        for request_id, tokens in client.tokens.items():
            end = client.ends.get(request_id)
            if client.is_lost or request_id == "aborted":
                assert tokens[: len(whole.tokens[request_id])] == whole.tokens[request_id][: len(tokens)]
            elif end == whole.ends[request_id]:
                assert tokens == whole.tokens[request_id]
            else:
                ended[request_id] += 1
                assert end == {
                    "row": ("error", "the row fails"),
                    "encode": ("error", "The output is too large to be sent."),
                }.get(kind)  # fmt: skip
                assert tokens == whole.tokens[request_id][: len(tokens)]
        assert client.is_lost or client.tokens.keys() | {"aborted"} == whole.tokens.keys() | {"aborted"}
    assert len(ended) <= 1
    assert kind != "row" or set(ended) == {failed.faults.failed_row} - {"aborted"}
    assert sum(client.is_lost for client in failed.clients.values()) == (kind == "send")
    num_failures = sum(client.num_failures for client in failed.clients.values() if not client.is_lost)
    assert num_failures == 2 * (kind == "step")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["plain", "async"])
def expected(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Run:
    return run(tmp_path_factory.mktemp("whole"), request.param)


def numbers_of(kinds: list[str], num_each: int) -> list[int]:
    """Some calls of each kind, the first and the last among them."""
    chosen: set[int] = set()
    for kind in KINDS:
        places = [number for number, one in enumerate(kinds, 1) if one == kind]
        chosen |= {places[index * (len(places) - 1) // max(num_each - 1, 1)] for index in range(num_each)}
    return sorted(chosen)


def check_all(expected: Run, folder: Path, numbers: list[int]) -> None:
    cores = {}
    for number in numbers:
        (place := folder / str(number)).mkdir()
        failed = run(place, expected.is_async, number)
        check(expected, failed)
        cores[number] = failed.core
    del failed
    gc.collect()
    left = {number: expected.faults.kinds[number - 1] for number, core in cores.items() if core() is not None}
    assert not left, "an engine core is still referenced"


def test_the_workload_has_calls_of_every_kind_and_is_the_same_each_time(expected: Run, tmp_path: Path) -> None:
    assert set(expected.faults.kinds) == KINDS
    stats = Counter(expected.faults.kinds)
    assert min(stats.values()) >= 3, stats
    again = run(tmp_path, expected.is_async)
    assert again.faults.kinds == expected.faults.kinds
    check(expected, again)


def test_some_calls_of_each_kind_fail_and_only_what_they_are_about_ends(expected: Run, tmp_path: Path) -> None:
    check_all(expected, tmp_path, numbers_of(expected.faults.kinds, 3))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_each_call_fails_once_and_only_what_it_is_about_ends(expected: Run, tmp_path: Path, part: int) -> None:
    check_all(expected, tmp_path, list(range(1 + part, len(expected.faults.kinds) + 1, 4)))
