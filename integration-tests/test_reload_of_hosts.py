"""Weights are exchanged on two machines together, while streams run on both."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts_endpoint import Endpoint, Loopback, Stream
from other_weights import write_checkpoints

PORT = 29620


class Reloading(Endpoint):
    """Two machines that have other weights to load."""

    folder: Path
    larger = json.dumps({"name": "larger", "num_kv_blocks": 4096})

    def reload(self, name: str, **fields: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.post("/v1/reload", json={"name": name, **fields}, timeout=120).json()
        return answer

    def weights(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/v1/models").json()["data"][0]["weights"]
        return found

    def start_with(self, *entries: str) -> Any:
        """The other machine, with another list."""
        usual = [*self._other_options]
        first = usual.index("--reload-models") + 1
        self._other_options[first : first + 3] = entries
        try:
            return self.start_other()
        finally:
            self._other_options = usual

    def cores(self, machine: Any) -> list[psutil.Process]:
        children = psutil.Process(machine.process.pid).children(recursive=True)
        found = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends
                if "engine_core" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def read_during(self, action: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[int, str]]]:
        """The answer of an action, and numbers and texts of streams that began and ended around it."""
        texts: list[tuple[int, str]] = []
        is_over = threading.Event()

        def read(number: int) -> None:
            while not is_over.is_set():
                stream = Stream(self.client, number, max_tokens=200)
                stream.run()
                assert stream.end == "length"
                texts.append((number, stream.text))

        with ThreadPoolExecutor(4) as pool:
            reading = [pool.submit(read, number) for number in range(4)]
            self.first.wait_for(lambda: self.num_running(0) and self.num_running(1), "streams on both machines")
            try:
                answer = action()
            finally:
                is_over.set()
            for one in reading:
                one.result()
        return answer, texts

    def wait_for_cores(self) -> None:
        """Returns when the engine cores of before have ended on both machines."""
        for machine in (self.first, self.other):
            self.wait_for_cores_of(machine)

    def wait_for_cores_of(self, machine: Any) -> None:
        self.first.wait_for(lambda: len(self.cores(machine)) == 1, "the engine core of now")


@pytest.fixture(scope="module")
def two(launch: Callable[..., Any]) -> Iterator[Reloading]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoints(folder)
        (file,) = (folder / "next").glob("*.safetensors")
        shutil.copytree(folder / "next", folder / "broken")
        (folder / "broken" / file.name).write_bytes(file.read_bytes()[:-64])
        entries = [f"next={folder}/next", Reloading.larger, f"broken={folder}/broken"]
        Reloading.folder = folder
        model = [str(folder / "first"), "--served-model-name", "llmstack-demo", "--reload-models", *entries]
        one = Reloading(Loopback(), launch, folder, model, PORT)
        yield one
        one.client.close()


@pytest.mark.full
def test_running_streams_finish_with_their_weights_or_move_on_both_machines(two: Reloading) -> None:
    first, first_weights = two.read(), two.weights()

    answer, texts = two.read_during(lambda: two.reload("next"))
    assert answer["num_finishing_requests"] > 0
    assert two.weights() == answer["weights"]
    assert two.weights()["digest"] != first_weights["digest"]
    two.wait_for_cores()
    other = two.read(lambda: None)  # it runs on both machines
    assert all(text in (first[number], other[number]) for number, text in texts)
    assert not set(first) & set(other)

    assert two.reload("start")["weights"] == first_weights
    two.wait_for_cores()
    answer, texts = two.read_during(lambda: two.reload("larger", running="move"))
    assert answer["num_moved_requests"] > 0
    assert all(text == first[number] for number, text in texts)
    two.wait_for_cores()
    assert two.read(lambda: None) == first


@pytest.mark.full
def test_what_fails_on_one_machine_changes_nothing_on_any(two: Reloading) -> None:
    first, before = two.read(), two.weights()

    def fail(name: str) -> str:
        answer, texts = two.read_during(lambda: two.reload(name))
        assert all(text == first[number] for number, text in texts)
        two.wait_for_cores()
        assert two.weights() == before
        return str(answer["error"]["message"])

    assert fail("broken")
    # The other machine has other files by that name.
    num_serves = two.first.log.count(" serves")
    two.signal_other(signal.SIGKILL)
    two.other = two.start_with(f"next={two.folder}/broken")
    assert two.other.process.wait(60) == 1  # it cannot serve what the first machine serves now
    assert "--reload-models has no entry larger" in two.other.log
    two.other = two.start_with(f"next={two.folder}/broken", two.larger)
    two.first.wait_for(lambda: two.first.log.count(" serves") > num_serves, "the other machine")
    process = f"(process {two.other.process.pid}): model.safetensors is damaged"
    assert process in fail("next")
    num_serves = two.first.log.count(" serves")
    two.signal_other(signal.SIGKILL)
    two.other = two.start_other()
    two.first.wait_for(lambda: two.first.log.count(" serves") > num_serves, "the other machine")
    # The other machine is killed while it loads.
    with ThreadPoolExecutor(1) as pool:
        reloading = pool.submit(two.reload, "next")
        two.first.wait_for(lambda: len(two.cores(two.other)) == 2, "an engine core that loads")
        two.signal_other(signal.SIGKILL)
        assert "is away" in reloading.result()["error"]["message"]
    assert two.read() == first
    two.wait_for_cores_of(two.first)
    # One that comes again has the weights of now.
    num_serves = two.first.log.count(" serves")
    assert "error" not in two.reload("next")
    other = two.read()
    two.other = two.start_other()
    two.first.wait_for(lambda: two.first.log.count(" serves") > num_serves, "the other machine")
    two.wait_for_cores()
    assert two.read(lambda: None) == other
    # A first machine that crashes begins with the weights of the start.
    two.first.stop(signal.SIGKILL)
    two.first = two.start_first()
    two.first.wait_for(lambda: " serves" in two.first.log, "the other machine")
    two.first.wait_for(lambda: two.client.get("/ready").status_code == 200, "ready server")
    assert two.read() == first
    assert two.first.stop() == 0
    assert two.other.process.wait(30) == 0
    assert "Traceback" not in two.first.log + two.other.log
