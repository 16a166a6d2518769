"""The engine core's process: it starts, refuses, dies and ends without leaving anything behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from engine_core_helpers.messages import decode_engine_message, encode
from engine_core_helpers.processes import eventually, is_running

from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_core import EngineConfig
from llmstack_engine_core import process as process_module
from llmstack_engine_core.ipc.sockets import (
    connect_client_socket,
    name_private_directory,
    private_address,
    remove_places,
)
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import MAX_CLIENT_FRAME_BYTES, AbortRequests, Hello
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    LLMStackError,
    ModelRunnerConfig,
    SamplingParams,
)


def request(request_id: str, max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=0))


def config(options: str = "", runner: str = "echo") -> EngineConfig:
    return EngineConfig(ModelRunnerConfig(f"echo?{options}"), runner=runner, log_level="WARNING", shutdown_grace_s=3.0)


class Peer:
    """A client made of nothing but a socket."""

    def __init__(self, process: EngineProcess, index: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = connect_client_socket(self.context, process.address, index)

    def send(self, message: object) -> None:
        self.socket.send(encode(message))

    def receive(self, kind: type) -> object:
        while True:
            assert self.socket.poll(20_000), f"no {kind.__name__} came"
            message = decode_engine_message(self.socket.recv())
            if isinstance(message, kind):
                return message

    def hello(self) -> EngineReady:
        self.send(Hello())
        return self.receive(EngineReady)

    def receive_some_outputs(self) -> list[EngineCoreOutput]:
        while True:
            outputs = self.receive(EngineCoreOutputs).outputs
            if outputs:
                return outputs

    def outputs_until_finished(self, request_id: str) -> list[int]:
        tokens: list[int] = []
        while True:
            for output in self.receive(EngineCoreOutputs).outputs:
                assert output.request_id == request_id
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    process = launch_engine_process(config())
    yield process
    process.stop()


def test_an_engine_core_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLMSTACK_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.setenv(name, "a-secret-of-the-server")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = launch_engine_process(config())
    try:
        place = Path(f"/proc/{process.pid}/environ")
        assert eventually(lambda: bool(place.read_bytes()))  # it is empty while the process is being replaced
        environment = place.read_bytes()
    finally:
        process.stop()
    assert b"a-secret-of-the-server" not in environment
    assert b"OMP_NUM_THREADS=1" in environment


@pytest.fixture
def peer(process: EngineProcess) -> Iterator[Peer]:
    peer = Peer(process)
    yield peer
    peer.close()


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"garbage"], [b"\xc1"], [encode(Hello()), b"x"], [b"\x91" * 9999], [b"x", b"y", b"z"]],
)
def test_garbage_does_not_end_the_engine_core(process: EngineProcess, peer: Peer, frames: list[bytes]) -> None:
    peer.hello()
    peer.socket.send_multipart(frames)
    peer.send(request("r"))
    assert peer.outputs_until_finished("r") == [5, 6, 7, 5]


def test_an_oversized_frame_does_not_end_the_engine_core(process: EngineProcess, peer: Peer) -> None:
    peer.hello()
    peer.socket.send(b"x" * (MAX_CLIENT_FRAME_BYTES + 1))
    other = Peer(process, index=1)
    other.hello()
    other.send(request("r"))
    assert other.outputs_until_finished("r") == [5, 6, 7, 5]
    other.close()


def test_a_refused_request_gets_an_error_of_its_own(process: EngineProcess, peer: Peer) -> None:
    peer.hello()
    peer.send(EngineCoreRequest("bad", [1], SamplingParams(temperature=-1.0)))
    (output,) = peer.receive(EngineCoreOutputs).outputs
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert "temperature" in output.error


def test_each_client_gets_its_own_outputs_and_cannot_touch_another_ones() -> None:
    process = launch_engine_process(config("step_delay_s=0.02"))
    peer, other = Peer(process), Peer(process, index=1)
    peer.hello()
    other.hello()
    peer.send(request("mine", max_tokens=100))
    assert peer.receive_some_outputs() == [EngineCoreOutput("mine", [5], num_cached_tokens=0)]
    other.send(AbortRequests(("mine",)))
    other.send(request("yours", max_tokens=3))
    assert other.outputs_until_finished("yours") == [5, 6, 7]
    other.send(request("mine"))
    (refused,) = other.receive_some_outputs()
    assert (refused.request_id, refused.error) == ("mine", "The request id is in use.")
    assert len(peer.outputs_until_finished("mine")) == 99
    for each in (peer, other):
        each.close()
    process.stop()


def test_the_blocks_of_a_client_that_goes_away_are_free_at_once(process: EngineProcess, peer: Peer) -> None:
    peer.hello()
    gone = Peer(process, index=1)
    num_blocks = gone.hello().num_blocks
    for index in range(40):  # some of them only wait
        gone.send(request(f"r{index}", max_tokens=2000))
    gone.receive(EngineCoreOutputs)
    gone.close()  # as the system closes it when its process is killed

    def is_idle() -> bool:
        peer.send(ControlCall(1, Control.STATS))
        stats = peer.receive(ControlResult).value
        return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, num_blocks)

    assert eventually(is_idle)


def test_a_message_before_hello_is_ignored(process: EngineProcess, peer: Peer) -> None:
    peer.send(request("early"))
    peer.hello()
    peer.send(request("r"))
    assert peer.outputs_until_finished("r") == [5, 6, 7, 5]


def test_no_client_can_end_the_process_by_a_message(process: EngineProcess, peer: Peer) -> None:
    ready = peer.hello()
    assert min(ready.phases_s["import_engine_core"], ready.phases_s["import_runner"]) > 0
    assert ready.pid == process.pid
    peer.send(ControlCall(7, Control.SHUTDOWN))
    assert peer.receive(ControlResult) == ControlResult(7, Control.SHUTDOWN, False)
    peer.send(request("r"))
    assert peer.outputs_until_finished("r") == [5, 6, 7, 5]


def test_the_process_ends_cleanly_when_it_is_asked_by_a_signal(process: EngineProcess, peer: Peer) -> None:
    peer.hello()
    process.terminate()
    assert eventually(lambda: not process.is_alive)
    assert process.describe_end() == "exit status 0"
    assert not process.directory.exists()


@pytest.mark.parametrize(
    ("number", "is_outside"),
    [(signal.SIGTERM, True), (signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGABRT, False)],
)
def test_signals_that_no_crash_causes_come_from_outside(number: signal.Signals, is_outside: bool) -> None:
    process = launch_engine_process(config())
    peer = Peer(process)
    try:
        peer.hello()
        assert not process.was_ended_from_outside
        os.kill(process.pid, number)
        assert eventually(lambda: not process.is_alive)
        assert process.was_ended_from_outside is is_outside
    finally:
        peer.close()
        process.stop()


def test_the_directory_is_private_and_the_process_in_a_session_of_its_own(process: EngineProcess, peer: Peer) -> None:
    peer.hello()
    assert process.directory.stat().st_mode & 0o777 == 0o700
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"echo?" not in command_line


def test_the_process_ends_on_sigterm_while_loading() -> None:
    process = launch_engine_process(config("load_delay_s=60"))
    assert eventually(lambda: any(process.directory.glob("*")))
    os.kill(process.pid, signal.SIGTERM)
    assert eventually(lambda: not process.is_alive)
    assert process.describe_end() == "exit status 0"
    assert not process.directory.exists()
    process.stop()


def test_stopping_at_once_leaves_nothing() -> None:
    process = launch_engine_process(config("load_delay_s=60"))
    process.stop()
    process.stop()
    assert not is_running(process.pid)
    assert not process.directory.exists()


@pytest.mark.parametrize("options", ["", "load_delay_s=60", "step_delay_s=60", "load_delay_s=61"])
def test_an_engine_core_whose_parent_was_killed_ends_and_removes_its_directory(options: str, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import time
        from llmstack_engine_core import EngineConfig
        from llmstack_engine_client import SyncMPClient
        from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

        client = SyncMPClient(EngineConfig(ModelRunnerConfig("echo?{options}"), runner="echo", log_level="ERROR"))
        if "load" not in "{options}":
            client.wait_until_ready()
            client.add_request(EngineCoreRequest("r", [1], SamplingParams(max_tokens=100_000, seed=0)))
        elif "61" not in "{options}":  # else it is killed at once, while the other one imports its modules
            while not any(client._process.directory.glob("*")):
                time.sleep(0.01)
        print(client.pid, client._process.directory, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, directory = parent.stdout.readline().split()
    assert is_running(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not is_running(int(pid)))
    assert eventually(lambda: not Path(directory).exists())


def test_a_parent_that_exits_without_shutdown_leaves_nothing() -> None:
    script = textwrap.dedent("""
        from llmstack_engine_core import EngineConfig
        from llmstack_engine_client import SyncMPClient
        from llmstack_types import ModelRunnerConfig

        client = SyncMPClient(EngineConfig(ModelRunnerConfig("echo"), runner="echo", log_level="ERROR"))
        client.wait_until_ready()
        print(client.pid, client._process.directory, flush=True)
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    pid, directory = result.stdout.split()
    assert not is_running(int(pid))
    assert not Path(directory).exists()
    assert result.stderr == ""


def test_the_process_imports_neither_torch_nor_numpy(process: EngineProcess, peer: Peer) -> None:
    ready = peer.hello()
    assert min(ready.phases_s["import_engine_core"], ready.phases_s["import_runner"]) > 0
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    script = "import sys, llmstack_engine_core.process, llmstack_engine_client, llmstack_engine_core.testing\n"
    script += "print(sorted({'torch', 'numpy', 'transformers', 'multiprocessing', 'pickle'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "torch" not in result.stdout
    assert "numpy" not in result.stdout
    assert "transformers" not in result.stdout


def test_a_step_that_fails_tells_the_clients_and_ends_the_process() -> None:
    process = launch_engine_process(config("fail_at_step=1"))
    peer = Peer(process)
    peer.hello()
    peer.send(request("r"))
    assert peer.socket.poll(20_000)
    reason = decode_engine_message(peer.socket.recv()).reason
    assert reason == "the engine core failed: RuntimeError; its log says more"
    assert eventually(lambda: not process.is_alive)
    assert process.describe_end() == "exit status 1"
    peer.close()
    process.stop()


@pytest.mark.parametrize(("error", "has_traceback"), [(LLMStackError("rank 1 of 2 ended"), 0), (ValueError("bug"), 1)])
def test_a_lost_rank_is_one_sentence_in_the_log_and_a_bug_has_a_traceback(
    error: Exception, has_traceback: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> None:
        raise error

    monkeypatch.setattr("llmstack_engine_core.engine_core_proc.EngineCoreProc.__init__", lambda self, *parts: None)
    monkeypatch.setattr("llmstack_engine_core.engine_core_proc.EngineCoreProc.run", fail)
    directory = name_private_directory()
    order = SimpleNamespace(config=config(), directory=directory, address=private_address(directory))

    def shut_down() -> None:
        process_module._exit_on_signal(signal.SIGTERM, None)  # its parent stops what has failed
        remove_places(directory, order.address)

    core = SimpleNamespace(shutdown=shut_down)
    monkeypatch.setattr(process_module, "_is_exiting", False)
    assert process_module._serve(order, None, {}, core) == 1  # type: ignore[arg-type]  # what the function uses of them
    process_module._exit_on_signal(signal.SIGTERM, None)
    assert not directory.exists()
    (record,) = caplog.records
    assert (str(error) in record.getMessage(), record.exc_info is not None) == (not has_traceback, bool(has_traceback))


def test_a_launcher_that_is_killed_before_its_order_leaves_no_directory() -> None:
    script = """
import os
from llmstack_engine_client.processes import launcher
from llmstack_engine_core import EngineConfig
from llmstack_types import ModelRunnerConfig
launcher.send_start_order = lambda *order: os._exit(9)
launcher.launch_engine_process(EngineConfig(ModelRunnerConfig("echo"), runner="echo"))
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is too long for sockets beside other workers
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60).returncode == 9
        assert list(Path(folder).iterdir()) == []


def test_a_signal_during_an_import_ends_the_process_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    def import_runner(name: str) -> None:
        process_module._exit_once()
        imported.append(name)

    monkeypatch.setattr(process_module, "load_model_runner", import_runner)
    for name in ("_is_exiting", "_is_exit_due"):
        monkeypatch.setattr(process_module, name, False)
    with pytest.raises(SystemExit):
        process_module._import_parts(["echo"])
    assert imported == ["echo"]
    assert gc.isenabled()


def test_the_process_collects_young_garbage_seldom() -> None:
    """What waits for the thread would be looked at again and again."""
    program = (
        "import gc; from llmstack_engine_core import process as p; p._import_parts([]); print(gc.get_threshold()[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 20_000
