"""Counts and prints the functions on a request's way.

Two paths are measured, each in the steady state, after warm-up requests:

- `api`: a streaming chat of four tokens through the main thread of `llmstack serve`, from the socket to the last
  chunk. The server runs as started by a user, with its engine core in another process; only its engine is the default
  one and its model the demo model. The client is a second thread, which is not counted.
- `engine-core`: one decode step of one row: reading the socket, scheduling, the model runner, encoding the outputs.
- `engine-core-eager`: the same with `enforce_eager`, so that the layers of the model are on the way too.

The figures are those of the median pass by functions: in others a block fills or two tokens come together. What runs by
the clock a few times per second, whether or not there is a request, is left out (`PERIODIC`).
A station is a file that passes a request on, since one of its functions calls one of another file. In the API process
they count from the first call of a function of `apis/` on, the route; in the engine core from the loop on.
Counted by `sys.setprofile`: functions of files under `packages/*/src`, without those whose names are in angle brackets
(lambdas, comprehensions). A resumption of a generator or coroutine is a call.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = f"{ROOT / 'packages'}{os.sep}"
NUM_TOKENS = 4
NUM_WARM_UPS = 3
NUM_REQUESTS = 9
SETTLE_S = 0.02
READY_TIMEOUT_S = 120.0
WAIT_S = 0.05
# The first steps of a row prefill it and capture the graph of one row; sixteen steps of decodes are all measured.
NUM_FIRST_STEPS = 20
NUM_STEPS = 9
ROUTES = f"{os.sep}apis{os.sep}"
PERIODIC = frozenset({"Server._accept", "Server._watch_engine", "AsyncMPClient._check_process"})


@dataclass
class Trace:
    """The calls of one pass, in order of their first call.

    Attributes:
        begin: Part of the path of the file that the stations begin with.
    """

    begin: str = ""
    first_calls: dict[CodeType, int] = field(default_factory=dict)
    stations: set[str] = field(default_factory=set)
    num_calls: int = 0
    _has_begun: bool = False

    def add(self, frame: FrameType) -> None:
        """Counts a call; of the first one of a function the depth is kept."""
        self.num_calls += 1
        path, callers = frame.f_code.co_filename, _callers(frame)
        self.first_calls.setdefault(frame.f_code, len(callers))
        self._has_begun = self._has_begun or self.begin in path
        if self._has_begun and callers and callers[0].co_filename != path:
            self.stations.add(callers[0].co_filename)

    def figures(self) -> dict[str, int]:
        """Distinct functions, distinct files, stations and calls."""
        files = {code.co_filename for code in self.first_calls}
        counts = {"functions": len(self.first_calls), "files": len(files), "stations": len(self.stations)}
        return {**counts, "calls": self.num_calls}

    def walk(self) -> list[str]:
        """The functions, each once, indented below their caller."""
        outermost = min(self.first_calls.values(), default=0)
        return [
            f"{'  ' * (depth - outermost)}{code.co_qualname}  ({_module(code)})"
            for code, depth in self.first_calls.items()
        ]


class Profile:
    """Follows the calls of the thread that installs it, while `trace` is set."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._is_counted: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """The function for `sys.setprofile`."""
        trace = self.trace
        if trace is not None and event == "call" and self._counts(frame.f_code) and not _is_periodic(frame):
            trace.add(frame)

    def _counts(self, code: CodeType) -> bool:
        counts = self._is_counted.get(code)
        if counts is None:
            counts = self._is_counted[code] = _is_ours(code)
        return counts


def _is_ours(code: CodeType) -> bool:
    path, name = os.path.abspath(code.co_filename), code.co_name
    return path.startswith(PACKAGES) and f"{os.sep}src{os.sep}" in path and not name.startswith("<")


def _is_periodic(frame: FrameType | None) -> bool:
    """Whether a timer of the server made the call, and no request."""
    while frame is not None:
        if frame.f_code.co_qualname in PERIODIC:
            return True
        frame = frame.f_back
    return False


def _callers(frame: FrameType) -> list[CodeType]:
    """The functions of this repository that the call stands in, the innermost first."""
    found, caller = [], frame.f_back
    while caller is not None:
        if _is_ours(caller.f_code):
            found.append(caller.f_code)
        caller = caller.f_back
    return found


def _module(code: CodeType) -> str:
    path = os.path.abspath(code.co_filename).removeprefix(PACKAGES)
    package, _, rest = path.partition(f"{os.sep}src{os.sep}")
    return f"{package}: {rest.partition(os.sep)[2]}"


def median(traces: list[Trace]) -> Trace:
    """The median pass by functions, then calls, of an odd number of passes."""
    return sorted(traces, key=lambda trace: (len(trace.first_calls), trace.num_calls))[len(traces) // 2]


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket, whose path is known before the server runs."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=READY_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(READY_TIMEOUT_S)
        self.sock.connect(self._path)


class _ChatClient(threading.Thread):
    """Sends chats to the server of the main thread, and ends that."""

    def __init__(self, socket_path: str, profile: Profile) -> None:
        super().__init__(name="client", daemon=True)
        self.traces: list[Trace] = []
        self.error: Exception | None = None
        self._socket_path = socket_path
        self._profile = profile

    def run(self) -> None:
        """Waits for the server, then sends one chat after the other over one connection."""
        try:
            self._wait_until_ready()
            connection = _UnixConnection(self._socket_path)
            for _ in range(NUM_WARM_UPS):
                self._chat(connection)
            for _ in range(NUM_REQUESTS):
                self._profile.trace = Trace(ROUTES)
                self._chat(connection)
                self.traces.append(self._profile.trace)
                self._profile.trace = None
            connection.close()
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            connection = _UnixConnection(self._socket_path)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(WAIT_S)
        raise TimeoutError("the server was not ready in time")

    def _chat(self, connection: _UnixConnection) -> None:
        body = {
            "model": "llmstack-demo", "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": NUM_TOKENS, "seed": 1, "stream": True,
        }  # fmt: skip
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200 or not text.rstrip().endswith("[DONE]"):
            raise RuntimeError(f"the chat failed: {response.status} {text[:500]}")
        time.sleep(SETTLE_S)


def trace_chat() -> Trace:
    """A streaming chat in the API process."""
    from llmstack_command.main import main as run_command

    profile, directory = Profile(), tempfile.mkdtemp(prefix="trace-")
    client = _ChatClient(f"{directory}/http.sock", profile)
    client.start()
    sys.setprofile(profile)
    try:
        status = run_command(["serve", "llmstack-demo", "--uds", f"{directory}/http.sock", "--log-level", "warning"])
    finally:
        sys.setprofile(None)
        shutil.rmtree(directory, ignore_errors=True)
    client.join(READY_TIMEOUT_S)
    if client.error is not None:
        raise client.error
    if status or not client.traces:
        raise RuntimeError(f"the server ended with status {status}")
    return median(client.traces)


def trace_step(*, is_eager: bool = False) -> Trace:
    """A decode step of one row in the engine core, its loop and its socket included."""
    from llmstack_demo_model import model_path
    from llmstack_engine_core.build import build_engine_core
    from llmstack_engine_core.engine_core_proc import EngineCoreProc
    from llmstack_engine_core.ipc.sockets import (
        bind_engine_socket,
        connect_client_socket,
        make_private_directory,
        private_address,
    )
    from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, Hello
    from llmstack_llm import EngineArgs
    from llmstack_types import EngineCoreRequest, SamplingParams

    model_config, config = EngineArgs(model=str(model_path()), enforce_eager=is_eager).create_engine_config()
    directory, context = make_private_directory(), zmq.Context()
    address = private_address(directory)
    core, bound = build_engine_core(config), bind_engine_socket(context, address)
    client = connect_client_socket(context, address, client_index=0)
    length = {"max_tokens": NUM_FIRST_STEPS + NUM_STEPS + 1, "ignore_eos": True}
    params = SamplingParams(**{**model_config.default_sampling, **length})
    try:
        loop = EngineCoreProc(core, bound)
        client.send(CLIENT_MESSAGES.encode(Hello()))
        client.send(CLIENT_MESSAGES.encode(EngineCoreRequest("traced", [1, 2, 3, 4, 5], params)))
        return _trace_steps(loop.run_once, client.recv)
    finally:
        core.shutdown()
        client.close()
        bound.close()
        context.term()
        shutil.rmtree(directory, ignore_errors=True)


def _trace_steps(run_once: Callable[[], None], receive: Callable[[], bytes]) -> Trace:
    profile, traces = Profile(), []
    for _ in range(NUM_FIRST_STEPS):
        run_once()
    for _ in range(NUM_STEPS):
        profile.trace = Trace()
        sys.setprofile(profile)
        run_once()
        sys.setprofile(None)
        traces.append(profile.trace)
    if not receive():
        raise RuntimeError("the engine core sent nothing")
    return median(traces)


PATHS: dict[str, tuple[str, Callable[[], Trace]]] = {
    "api": (f"a streaming chat of {NUM_TOKENS} tokens in the API process", trace_chat),
    "engine-core": ("one decode step of one row in the engine core", trace_step),
    "engine-core-eager": ("one eager decode step of one row in the engine core", partial(trace_step, is_eager=True)),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", nargs="?", choices=PATHS, help="measure this path only")
    parser.add_argument("--walk", action="store_true", help="print the functions, each once, below their caller")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for name in [options.path] if options.path else PATHS:
        title, measure = PATHS[name]
        trace = measure()
        figures[name] = trace.figures() | ({"walk": trace.walk()} if options.walk and options.json else {})
        if not options.json:
            counts = ", ".join(f"{count:,} {what}" for what, count in trace.figures().items())
            print("\n".join([f"{title}: {counts}", *(trace.walk() if options.walk else [])]))
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
