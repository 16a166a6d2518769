"""Ranks of several nodes, which are agents in threads on this machine; the ranks themselves are processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from engine_core_helpers.ports import free_address
from parallel_helpers.families import write_family
from parallel_helpers.schedules import NUM_BLOCKS, make_config

from llmstack_engine_client.hosts.members import difference
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.hosts import facts
from llmstack_parallel.hosts.agent import NodeAgent
from llmstack_parallel.hosts.peers import HostPeers
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EngineStartError, ModelRunnerConfig, RankPlacement, SamplingParams


class Node:
    """A node but node 0, until it ends or is asked to."""

    def __init__(self, config: ModelRunnerConfig, number: int = 1) -> None:
        assert config.placement is not None
        config = replace(config, placement=replace(config.placement, node=number))
        self.error: Exception | None = None
        self.agent = NodeAgent(config, 120)
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(self.agent.run())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._running)
        except EngineStartError as error:
            self.error = error
        except asyncio.CancelledError:
            pass  # it was stopped
        self._loop.close()

    def join(self) -> str:
        """Waits for its end; what it says, if anything."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return str(self.error or "")

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._running.cancel)
        self.join()


class Cable:
    """Carries what a node and node 0 send each other, until it is cut."""

    def __init__(self, address: str) -> None:
        self._to = _place(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = False
        self._ways: dict[socket.socket, socket.socket] = {}
        threading.Thread(target=self._carry, daemon=True).start()

    def cut(self, *, is_cut: bool) -> None:
        """Carries nothing, and closes nothing, while it is cut."""
        self._is_cut = is_cut

    def _carry(self) -> None:
        while True:
            if self._is_cut:
                sleep(0.05)
                continue
            for ready in select.select([self._listener, *self._ways], [], [], 0.05)[0]:
                if ready is self._listener:
                    self._connect()
                elif ready in self._ways and not self._is_cut:
                    self._pass_on(ready)

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._to)
        except OSError:
            near.close()
            return
        self._ways |= {near: far, far: near}

    def _pass_on(self, source: socket.socket) -> None:
        target = self._ways[source]
        try:
            data = source.recv(65_536)
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, target):
                del self._ways[end]
                end.close()


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models") / "llama", "llama")


def placed(folder: Path, *, silence_s: float = 20.0, **changes: Any) -> ModelRunnerConfig:
    """Two nodes that share a model, as node 0 is configured."""
    key_file = folder / "cluster.key"
    make_key_file(key_file)
    placement = RankPlacement("external_launcher", 2, 0, free_address(), str(key_file), "lo", silence_s)
    return make_config(folder, placement=placement, **changes)


def alone(folder: Path) -> ModelRunner:
    runner = ModelRunner(make_config(folder))
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def started(config: ModelRunnerConfig) -> ParallelRunner:
    runner = ParallelRunner(config)
    try:
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
    except BaseException:
        runner.shutdown()
        raise
    return runner


def sampled(runner: ModelRunner | ParallelRunner, num_tokens: int = 12) -> list[list[int]]:
    driver = StepDriver(runner, NUM_BLOCKS)  # type: ignore[arg-type]  # it calls what both have
    for index in range(3):
        params = SamplingParams(temperature=0.9 if index else 0.0, seed=index)
        driver.add(f"request {index}", [5, 9, 30, 2, 77 - index], params)
    outputs = driver.run(num_tokens)
    for index in range(3):
        driver.remove(f"request {index}")
    driver.step({})
    return [outputs[f"request {index}"] for index in range(3)]


def lose(runner: ParallelRunner, match: str) -> None:
    """Computes steps until a rank is missed, and ends as the engine core does: others are about to take its place."""
    with pytest.raises(LostRankError, match=match):  # noqa: PT012
        try:
            while True:
                sampled(runner)
        finally:
            runner.shutdown()


def test_a_node_hosts_the_ranks_of_one_engine_core_after_the_other(folder: Path) -> None:
    config = placed(folder, pipeline_parallel_size=2, silence_s=2.0)
    assert config.placement is not None
    cable = Cable(config.placement.address)
    node = Node(replace(config, placement=replace(config.placement, address=cable.address)))
    expected = sampled(alone(folder))
    runner = started(config)
    assert sampled(runner) == expected
    assert runner.backends()["ranks"].endswith("NodesExchange")
    cable.cut(is_cut=True)
    lose(runner, "node 1 on .* has given no sign of life for 2 s")
    cable.cut(is_cut=False)

    runner = started(config)
    assert sampled(runner) == expected
    assert node.agent.ranks is not None
    os.kill(node.agent.ranks.pids()[1], signal.SIGKILL)
    lose(runner, "node 1 on .*: rank 1 of 2 ended with status -9")
    node.stop()


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=str)
def test_ranks_of_two_nodes_give_the_tokens_of_one_process(sizes: tuple[int, int], folder: Path) -> None:
    config = placed(folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    node = Node(config)
    runner = started(config)
    assert sampled(runner) == sampled(alone(folder))
    runner.shutdown()
    assert node.join() == ""  # it ends with node 0


@pytest.mark.full
def test_a_rank_of_another_node_that_is_stopped_is_noticed_by_the_deadline_of_a_step(folder: Path) -> None:
    for sizes in ((1, 2), (2, 1)):
        config = placed(folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], rank_timeout_s=1.0)
        node = Node(config)
        runner = started(config)
        assert node.agent.ranks is not None
        os.kill(node.agent.ranks.pids()[1], signal.SIGSTOP)
        with pytest.raises(LostRankError, match="does not answer"):
            sampled(runner)
        runner.shutdown()
        assert node.join() == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 1}, "tensor_parallel_size is 1, but 2"),
        ({"dtype": "bfloat16"}, "dtype is float32, but bfloat16"),
        ({"model_path": "other"}, "digest of the model's files is "),
        ({"version": "0.0.1"}, "version is "),
    ],
    ids=str,
)
def test_a_node_that_differs_is_refused_on_both_sides_with_one_sentence(
    change: dict[str, Any], sentence: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = placed(folder, pipeline_parallel_size=2)
    other, version = dict(change), change.get("version")
    other.pop("version", None)
    if "model_path" in other:
        other["model_path"] = str(write_family(tmp_path / "other", "llama with one kv head"))
    with monkeypatch.context() as release:
        if version:
            release.setattr(facts, "own_version", lambda: version)
        node = Node(replace(config, **other))
    with pytest.raises(EngineStartError, match=f"node 0 on .* and node 1 on .* differ: {sentence}") as refusal:
        HostPeers(config)
    assert node.join() == str(refusal.value)


def test_nodes_with_different_keys_do_not_talk_and_both_say_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = placed(folder, pipeline_parallel_size=2)
    assert config.placement is not None
    make_key_file(tmp_path / "other.key")
    node = Node(replace(config, placement=replace(config.placement, key_file=str(tmp_path / "other.key"))))
    threading.Thread(target=HostPeers, args=(config,), daemon=True).start()  # it waits for a node with its keys
    assert node.join() == f"node 0 at {config.placement.address} and this machine have different keys"
    address = config.placement.address
    said, end_s = f"a machine with different keys, or none, has tried to join {address}", monotonic() + 60
    while said not in caplog.text and monotonic() < end_s:  # node 0 looks once in a while
        sleep(0.01)
    assert said in caplog.text


def test_sums_between_nodes_need_an_interface_that_is_trusted_and_there(folder: Path) -> None:
    config = placed(folder, tensor_parallel_size=2)
    assert config.placement is not None
    elsewhere = replace(config, placement=replace(config.placement, interface="nowhere"))
    for start in (lambda: NodeAgent(elsewhere, 1), lambda: HostPeers(elsewhere)):  # on every node
        with pytest.raises(EngineStartError, match=r"no such network interface .* it has lo"):
            start()


def test_sizes_are_compared_before_the_defaults_that_follow_from_them(folder: Path) -> None:
    config = placed(folder, pipeline_parallel_size=2)
    other = replace(config, tensor_parallel_size=2, pipeline_parallel_size=1, max_num_drafts=6, max_num_logits=16)
    assert difference(facts.facts_of(config), facts.facts_of(other)) == "tensor_parallel_size is 1, but 2"


def test_nodes_compare_their_gpus_and_pytorch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share every layer each compute the same norms, and must draw the same tokens."""
    config = placed(folder, tensor_parallel_size=4, device="auto")
    on_cpu = facts.facts_of(config)
    with monkeypatch.context() as newer:
        newer.setattr(torch, "__version__", "9.9.9")
        assert difference(on_cpu, facts.facts_of(config)).startswith("torch is ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    on_gpus = facts.facts_of(config)
    assert difference(on_cpu, on_gpus) == "device is cpu, but cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert difference(on_gpus, facts.facts_of(config)) == ""  # two are enough
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sentence = "number of GPUs for the 2 ranks of a node is 2, but 1"
    assert difference(on_gpus, facts.facts_of(config)) == sentence
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    assert difference(on_gpus, facts.facts_of(config)) == sentence


def test_what_nodes_compare_is_named_by_its_difference() -> None:
    assert difference((("a", "1"), ("b", "2")), (("a", "1"), ("b", "2"))) == ""
    assert difference((("a", "1"),), (("a", "1"), ("b", "2"))) == "b is unknown, but 2"
    assert difference((("kernel linear", "native (avx512)"),), (("kernel linear", "native (avx2)"),)) == (
        "kernel linear is native (avx512), but native (avx2)"
    )
