"""Clients that are slow, stop reading or are cut off leave nothing behind and disturb no other client."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import quantiles
from types import SimpleNamespace
from typing import Any

import good_client as good_client_program
import pytest

BODY = {"model": "model", "prompt": "abc", "temperature": 0, "stream": True, "ignore_eos": True}
MAX_LEFT_MIB = 48.0
CLIENTS_AT_ONCE = 10
NUM_GOOD_STREAMS = 100
MAX_TEST_S = 120 + 1800 * float(os.environ.get("FAULTS_SCALE", "0.1"))
pytestmark = pytest.mark.timeout(MAX_TEST_S)


def request_bytes(max_tokens: int, **fields: Any) -> bytes:
    content = json.dumps({**BODY, "max_tokens": max_tokens, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = f"{head}Content-Length: {len(content)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + content


def read_stream(target: Any, max_tokens: int = 20) -> bytes:
    """Everything that comes of a stream."""
    with target.connect() as client:
        client.sendall(request_bytes(max_tokens))
        received = b""
        while piece := client.recv(65536):
            received += piece
        return received


def is_whole(answer: bytes) -> bool:
    return b" 200 " in answer[:20] and b"data: [DONE]" in answer


def text_of(answer: bytes) -> str:
    """The text of a stream, whose tokens may come in any number of events."""
    events = re.findall(rb"^data: (\{.*\})$", answer, re.MULTILINE)
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


@contextmanager
def nothing_is_left(target: Any) -> Iterator[None]:
    """Requests, blocks, descriptors and memory are what they were, once all clients have gone."""
    assert is_whole(read_stream(target))  # what the first request loads is there
    num_files, memory_mib = target.num_files(), target.resident_mib()
    yield
    wait_until(target.is_idle, "idle server")
    wait_until(lambda: not target.metric("vllm:kv_cache_usage_perc"), "freed blocks")
    wait_until(lambda: target.num_files() <= num_files + 8, f"closed descriptors, {num_files} before")
    assert target.resident_mib() < memory_mib + MAX_LEFT_MIB
    assert is_whole(read_stream(target))


@dataclass
class GoodClient:
    """The times of a client that behaves, in seconds: to each first token, and of the server's processor."""

    first_token_s: list[float]
    processor_s: float

    def __str__(self) -> str:
        p99_ms = quantiles(self.first_token_s, n=100)[98] * 1e3
        return f"p99 TTFT {p99_ms:.0f} ms, {self.processor_s / len(self.first_token_s) * 1e3:.1f} ms of processor time"


def good_client(target: Any, count: int) -> GoodClient:
    """Streams one after the other from another process; each of them ends as it should."""
    body = json.dumps({**BODY, "max_tokens": 20})
    before_s = target.processor_s()
    command = [sys.executable, good_client_program.__file__, *map(str, target.address), str(count), body]
    times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return GoodClient(times, target.processor_s() - before_s)


class SlowSenders:
    """Clients that send a byte a second of a request; one that the server has given up begins again."""

    def __init__(self, target: Any, count: int, message: bytes) -> None:
        self._target, self._message = target, message
        self._clients = [target.connect() for _ in range(count)]
        self._num_sent = [0] * count
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SlowSenders:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for client in self._clients:
            client.close()

    def _run(self) -> None:
        """Spreads the bytes over each second, since the clients know nothing of each other."""
        while True:
            for index in range(len(self._clients)):
                self._send_byte(index)
                if index % CLIENTS_AT_ONCE == 0 and self._is_over.wait(CLIENTS_AT_ONCE / len(self._clients)):
                    return

    def _send_byte(self, index: int) -> None:
        place = self._num_sent[index]
        try:
            self._clients[index].send(self._message[place : place + 1])
            self._num_sent[index] += 1
        except ConnectionError:  # the server waits fifteen seconds for headers
            self._clients[index].close()
            self._clients[index] = self._target.connect()
            self._num_sent[index] = 0


def test_connections_that_send_a_byte_now_and_then(target: Any, scale: float) -> None:
    alone = good_client(target, NUM_GOOD_STREAMS)
    with nothing_is_left(target), SlowSenders(target, round(1000 * scale), request_bytes(5)):
        beside = good_client(target, NUM_GOOD_STREAMS)
    print(f"alone: {alone}; beside them: {beside}")


def test_a_slow_sender_that_is_given_up_begins_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = SimpleNamespace(connect=lambda: socket.create_connection(server.getsockname(), timeout=60))
        with SlowSenders(target, 1, b"GET / HTTP/1.1"):
            for _ in range(2):
                connection, _ = server.accept()
                assert connection.recv(1) == b"G"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()  # by a reset, as a server does that gives up a client


def test_readers_that_stop(target: Any, scale: float) -> None:
    alone = good_client(target, NUM_GOOD_STREAMS)
    with nothing_is_left(target), ExitStack() as stack:
        for _ in range(round(500 * scale)):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(target.address)
            client.sendall(request_bytes(100, logprobs=5))
        wait_until(target.is_idle, "end of the generation")
        beside = good_client(target, NUM_GOOD_STREAMS)
    print(f"alone: {alone}; beside them: {beside}")


def test_connections_that_are_cut_at_random_bytes(target: Any, scale: float) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    message = request_bytes(40)
    text = text_of(read_stream(target))
    assert text
    with nothing_is_left(target):
        for index in range(round(10_000 * scale)):
            with target.connect() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
                if draw.random() < 0.5:
                    client.sendall(message[: draw.randrange(len(message))])
                else:
                    client.sendall(message)
                    client.recv(draw.randrange(1, 400))
            if index % 200 == 0:
                answer = read_stream(target)
                assert is_whole(answer)
                assert text_of(answer) == text


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_connections_that_are_opened_and_closed(target: Any, scale: float, path: str) -> None:
    with nothing_is_left(target):
        for _ in range(round(2000 * scale)):
            with target.connect() as client:
                client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
