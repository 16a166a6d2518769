"""One model whose ranks are on two machines: the same command on each, and what becomes of streams when one ends."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from two_machines import FIRST, Namespaces

from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import ServeConfig, config_from

PORT = 29620
ROOT = Path(__file__).resolve().parents[1]


def parsed(line: list[str]) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(settings_from(parser.parse_args(line), {}))


def options(key_file: Path, *sizes: str, address: str = FIRST, interface: str = "cable") -> list[str]:
    if not key_file.exists():
        subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", str(key_file)], check=True)
    return [
        *sizes, "--nnodes", "2", "--master-addr", address, "--master-port", str(PORT),
        "--cluster-key-file", str(key_file), "--trust-cluster-network", interface,
        "--max-model-len", "512", "--cluster-timeout", "2",
    ]  # fmt: skip


class Machines:
    """Node 0, which answers HTTP, and the other one."""

    def __init__(self, namespaces: Namespaces, launch: Callable[..., Any], tmp_path: Path, *sizes: str) -> None:
        self._options, self._launch, self._namespaces = options(tmp_path / "cluster.key", *sizes), launch, namespaces
        uds = tmp_path / "http.sock"
        self.first = self.start("first", "0", "--uds", str(uds))
        self.other = self.start("other", "1")
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://first", timeout=120)
        self.first.wait_for(lambda: "llmstack is ready" in self.first.log, "ready server")

    def start(self, machine: str, number: str, *arguments: str) -> Any:
        prefix = self._namespaces.prefix(machine)
        return self._launch(*self._options, "--node-rank", number, *arguments, prefix=prefix)

    def read(self, meanwhile: Callable[[], None] | None = None) -> str:
        body = {"model": "llmstack-demo", "prompt": "One stream", "max_tokens": 200, "seed": 7, "ignore_eos": True}
        text = ""
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            for number, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if number == 10 and meanwhile is not None:
                    meanwhile()
        return text

    def rank(self) -> psutil.Process:
        """The process of the rank on the other machine."""
        found = [
            process
            for process in psutil.Process(self.other.process.pid).children(recursive=True)
            if "llmstack_parallel.rank" in process.cmdline()
        ]
        assert len(found) == 1
        return found[0]


@pytest.fixture
def machines(namespaces: Namespaces, launch: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(*sizes: str) -> Machines:
        made.append(Machines(namespaces, launch, tmp_path, *sizes))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


@pytest.mark.full  # packages/parallel/tests/test_nodes.py has the same without a network between nodes
@pytest.mark.parametrize("num_api_processes", [1, 2])
def test_a_stream_goes_on_with_the_same_text_when_a_rank_of_another_machine_ends(
    machines: Callable[..., Machines], num_api_processes: int
) -> None:
    two = machines("-pp", "2", "--api-server-count", str(num_api_processes))
    expected = two.read()
    assert len(expected) > 200
    assert two.read(lambda: two.rank().kill()) == expected
    assert two.client.get("/server_info").json()
    assert two.first.stop() == 0
    assert two.other.process.wait(30) == 0  # it ends with the first machine
    assert "Traceback" not in two.other.log
    assert "Traceback" not in two.first.log
    assert "the engine core ends: " in two.first.log or num_api_processes == 1


@pytest.mark.full
def test_a_stream_goes_on_with_the_same_text_when_a_machine_is_cut_off_and_when_it_starts_again(
    machines: Callable[..., Machines], namespaces: Namespaces
) -> None:
    two = machines("-tp", "2")
    expected = two.read()
    assert "they exchange data by NodesExchange" in two.first.log

    def cut_off() -> None:
        namespaces.set_cable("down")
        two.first.wait_for(lambda: "has given no sign of life for 2 s" in two.first.log, "loss of a machine")
        namespaces.set_cable("up")

    assert two.read(cut_off) == expected

    def start_again() -> None:
        two.other.stop(signal.SIGKILL)
        two.other = two.start("other", "1")

    assert two.read(start_again) == expected
    two.first.stop(signal.SIGKILL)
    assert two.other.process.wait(30) == 0  # its engine core ends in order, and the other machine with it


@pytest.mark.full
def test_a_machine_with_another_model_is_refused_on_both_with_one_sentence(
    namespaces: Namespaces, launch: Callable[..., Any], tmp_path: Path
) -> None:
    both = []
    for machine, number, dtype in (("first", "0", "float32"), ("other", "1", "bfloat16")):
        arguments = options(tmp_path / "cluster.key", "-pp", "2")
        prefix = namespaces.prefix(machine)
        both.append(launch(*arguments, "--node-rank", number, "--dtype", dtype, prefix=prefix))
    for server in both:
        assert server.process.wait(120) == 1
        assert re.search("node 0 on .* and node 1 on .* differ: dtype is float32, but bfloat16", server.log)
        assert "Traceback" not in server.log


@pytest.mark.full
def test_replicas_of_several_machines_have_ranks_on_several_machines(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    line = options(tmp_path / "cluster.key", "-pp", "2", address="127.0.0.1", interface="lo")
    line += ["-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "-dpp", str(PORT + 1)]
    other = [*line, "--headless", "-dpr", "1", "--master-port", str(PORT + 2)]
    first = launch(*line, "--node-rank", "0")
    rest = [
        launch(*line, "--node-rank", "1"),
        launch(*other, "--node-rank", "0"),
        launch(*other, "--node-rank", "1"),
    ]
    first.wait_until_ready()
    first.wait_for(lambda: first.log.count(" serves") == 1, "engine core of another machine")
    engines = first.get_json("/server_info")["engines"]
    assert [engine["backends"]["ranks"] for engine in engines] == ["1 per stage, 2 stages, NodesExchange"] * 2
    body = {"model": "llmstack-demo", "prompt": "One", "max_tokens": 20, "temperature": 0}
    texts = {first.post("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 1
    assert first.stop() == 0
    assert [server.process.wait(30) for server in rest] == [0, 0, 0]


def test_each_command_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text()
    section = page.partition("\n## Several machines\n")[2].partition("\n## ")[0]
    commands = [line.removeprefix("RAY_ADDRESS=10.0.0.1:6379 ") for line in section.splitlines()]
    served = [line.split()[2:] for line in commands if line.startswith("llmstack serve ")]
    engines = [parsed(line).engine for line in served]
    placed = [(engine.num_nodes, engine.node_rank) for engine in engines]
    assert placed == [(2, 0), (2, 1), (4, 0)]


def test_the_manifest_for_kubernetes_starts_one_model_on_all_pods_of_a_group() -> None:
    manifest, service = yaml.safe_load_all((ROOT / "deploy/leader-worker-set.yaml").read_text())
    template = manifest["spec"]["leaderWorkerTemplate"]
    for index, role in enumerate(("leaderTemplate", "workerTemplate")):
        pod = template[role]["spec"]
        (container,) = pod["containers"]
        mounts = [*container["volumeMounts"], *pod["initContainers"][0]["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        variables = {"POD_IP": "10.1.0.7", "LWS_LEADER_ADDRESS": "10.1.0.7"}
        variables |= {"LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": str(index)}
        text = "\n".join(container["command"])
        for name, value in variables.items():
            text = text.replace(f"$({name})", value)
        line = text.split("\n")
        engine, http = parsed(line[2:]).engine, parsed(line[2:]).http
        assert (line[:2], http.host, http.port) == (["llmstack", "serve"], "10.1.0.7", 8000)
        assert (engine.num_nodes, engine.num_ranks, engine.node_rank) == (2, 2, index)
        assert engine.cluster_key_file == "/keys/cluster.key"
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert labels.items() <= service["spec"]["selector"].items()
    assert service["spec"]["ports"][0]["targetPort"] == 8000


def test_the_command_for_slurm_is_one() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("srun ")]
    command = line.partition("llmstack serve ")[2].rstrip("'")
    command = command.replace("$(scontrol show hostnames | head -1)", "10.0.0.1")
    command = command.replace("$SLURM_NNODES", "2").replace("$SLURM_NODEID", "1")
    engine = parsed(command.split()).engine
    assert (engine.num_nodes, engine.node_rank) == (2, 1)
