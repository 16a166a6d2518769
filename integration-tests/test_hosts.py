"""An endpoint over two machines: what happens to one of them costs a pause, and no stream its text."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts_endpoint import Endpoint, Loopback
from two_machines import Namespaces

import llmstack_demo_model

PORT = 29600


@pytest.fixture(scope="module")
def slow_echo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models") / "echo?step_delay_s=0.01"
    folder.symlink_to(llmstack_demo_model.model_path())
    return [str(folder), "--runner", "echo", "--served-model-name", "llmstack-demo"]


@pytest.fixture(scope="module")
def endpoint(namespaces: Namespaces, launch: Callable[..., Any], slow_echo: list[str]) -> Iterator[Endpoint]:
    with tempfile.TemporaryDirectory() as folder:
        one = Endpoint(namespaces, launch, Path(folder), slow_echo, PORT)
        yield one
        one.client.close()


def test_streams_go_on_when_a_machine_is_cut_off_stopped_and_killed(endpoint: Endpoint, namespaces: Namespaces) -> None:
    expected = endpoint.read()
    assert len(set(expected)) == 4

    assert endpoint.read(lambda: namespaces.set_cable("down")) == expected
    namespaces.set_cable("up")
    endpoint.wait_until_both_serve(2)  # it has rejoined with the processes that it had

    assert endpoint.read(lambda: endpoint.signal_other(signal.SIGSTOP)) == expected
    endpoint.signal_other(signal.SIGCONT)
    endpoint.wait_until_both_serve(3)

    assert endpoint.read(lambda: endpoint.signal_other(signal.SIGKILL)) == expected
    endpoint.other = endpoint.start_other()
    endpoint.wait_until_both_serve(4)
    assert endpoint.read(lambda: None) == expected  # both serve again

    assert endpoint.first.stop() == 0
    assert endpoint.other.process.wait(30) == 0  # it ends with the first machine
    assert "Traceback" not in endpoint.first.log + endpoint.other.log


@pytest.fixture(scope="module")
def loopback(launch: Callable[..., Any]) -> Iterator[Endpoint]:
    """The demo model, whose streams are sampled, on two machines that are one."""
    with tempfile.TemporaryDirectory() as folder:
        one = Endpoint(Loopback(), launch, Path(folder), [], PORT + 1)
        yield one
        one.client.close()


@pytest.mark.full
def test_sampled_streams_go_on_with_the_same_text_in_each_phase(loopback: Endpoint) -> None:
    # A chunk has several tokens where the reader is slow.
    expected = loopback.read(max_tokens=400)
    for num_joins, num_chunks in enumerate((1, 30), start=2):  # just after the prompt, and in the middle
        texts = loopback.read(lambda: loopback.signal_other(signal.SIGKILL), num_chunks=num_chunks, max_tokens=400)
        assert texts == expected
        loopback.other = loopback.start_other()
        loopback.wait_until_both_serve(num_joins)


@pytest.mark.full
def test_a_machine_of_other_bits_is_refused_on_both_sides(loopback: Endpoint) -> None:
    loopback.signal_other(signal.SIGKILL)
    other = loopback.start_other("--dtype", "float32")
    assert other.process.wait(120) == 1
    assert "engine core 0 and engine core 1 on" in other.log
    assert "dtype is bfloat16, but float32" in other.log
    assert "dtype is bfloat16, but float32" in loopback.first.log
    assert loopback.client.get("/ready").status_code == 200
    assert "Traceback" not in other.log


@pytest.mark.full
def test_a_first_machine_that_crashes_is_joined_again_without_loading(loopback: Endpoint) -> None:
    num_serves = loopback.first.log.count(" serves")
    loopback.other = loopback.start_other()
    loopback.wait_until_both_serve(num_serves + 1)
    pids = {process.pid for process in loopback.processes_of_other()}
    loopback.first.stop(signal.SIGKILL)
    loopback.first = loopback.start_first()
    loopback.wait_until_ready()
    assert {process.pid for process in loopback.processes_of_other()} == pids
    assert len(set(loopback.read())) == 4
    assert loopback.first.stop() == 0
    assert loopback.other.process.wait(30) == 0


@pytest.mark.full  # packages/engine-client/tests/test_relayed_members.py has the parts
def test_streams_of_several_api_processes_go_on_when_a_machine_is_lost(
    namespaces: Namespaces, launch: Callable[..., Any], slow_echo: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two = Endpoint(namespaces, launch, Path(folder), slow_echo, PORT + 2, "--api-server-count", "2")
        expected = two.read()
        assert len(set(expected)) == 4
        information = two.client.get("/server_info").json()
        assert len(information["engines"]) == 2
        assert information["processes"]["num_api_servers"] == 2

        assert two.read(lambda: namespaces.set_cable("down")) == expected
        namespaces.set_cable("up")
        two.wait_until_both_serve(2)

        assert two.read(lambda: two.signal_other(signal.SIGKILL)) == expected
        two.other = two.start_other()
        two.wait_until_both_serve(3)

        # An API process that is replaced learns of the machine that is there.
        worker = next(one for one in two.processes_of_first() if "api_worker" in " ".join(one.cmdline()))
        worker.kill()
        two.first.wait_for(lambda: two.first.log.count(" serves") == 3 * 2 + 1, "replaced API process")
        assert two.read() == expected

        # The engine core of the first machine is replaced, and its requests go on in the other one meanwhile.
        core = next(one for one in two.processes_of_first() if "engine_core" in " ".join(one.cmdline()))
        assert two.read(core.kill) == expected

        assert two.first.stop() == 0
        assert two.other.process.wait(30) == 0
        assert "Traceback" not in two.first.log + two.other.log
        two.client.close()


@pytest.mark.full  # test_processes.py has the same on one machine
def test_an_api_process_that_starts_after_the_engine_core_of_its_machine_has_ended_serves_with_others(
    launch: Callable[..., Any], slow_echo: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ("--max-engine-restarts", "1", "--api-server-count", "2")
        two = Endpoint(Loopback(), launch, Path(folder), slow_echo, PORT + 3, *options)

        def of_first(module: str) -> list[psutil.Process]:
            found = []
            for one in two.processes_of_first():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [one] if module in " ".join(one.cmdline()) else []
            return found

        def has_ended_for_good() -> bool:
            for core in of_first("engine_core.process"):
                core.kill()
            return "the others go on" in two.first.log

        two.first.wait_for(has_ended_for_good, "end of an engine core")
        of_first("api_worker")[0].kill()
        two.first.wait_for(lambda: two.first.log.count(" serves") == 3, "replaced API process")
        assert len(set(two.read())) == 4
        assert two.first.stop() == 0
        assert two.other.process.wait(30) == 0
        two.client.close()


@pytest.mark.full
def test_a_port_that_is_taken_is_refused_before_anything_starts(
    launch: Callable[..., Any], slow_echo: list[str], tmp_path: Path
) -> None:
    key_file = str(tmp_path / "cluster.key")
    subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", key_file], check=True)
    for count in ("1", "2"):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            address = ["-dpa", "127.0.0.1", "-dpp", port, "--cluster-key-file", key_file]
            server = launch(*slow_echo, "-dp", "2", "-dpl", "1", *address, "--api-server-count", count)
            assert server.process.wait(60) == 1
        assert f"tcp://127.0.0.1:{port} cannot be listened on: Address already in use" in server.log
        assert "Traceback" not in server.log
