"""Where and how a server listens, what its log says, and what rude connections cannot do to the others."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

BODY = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0}


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self._path)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


@pytest.fixture
def socket_path() -> Iterator[str]:
    """In a folder with a short name: the paths of sockets are limited."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "llm.sock")


def wait_until_ready(server: Any) -> None:
    server.wait_for(lambda: "is ready on" in server.log, "ready server")


def test_a_server_on_a_unix_socket_with_flags_from_a_file(
    launch: Callable[..., Any], socket_path: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"uds: {socket_path}\nenable_log_requests: true\nmax-log-len: 4\nserved-model-name: [from-file]\n")
    server = launch("--config", str(file), "--served-model-name", "mine")
    wait_until_ready(server)
    assert f"is ready on unix:{socket_path}" in server.log
    assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600
    status, models = ask(UnixConnection(socket_path), "GET", "/v1/models")
    assert (status, json.loads(models)["data"][0]["id"]) == (200, "mine")
    assert ask(UnixConnection(socket_path), "POST", "/v1/completions", {**BODY, "request_id": "abc"})[0] == 200
    assert ask(UnixConnection(socket_path), "POST", "/v1/completions", {**BODY, "stream": True})[1].endswith(
        b"data: [DONE]\n\n"
    )
    assert ask(UnixConnection(socket_path), "POST", "/reset_prefix_cache")[0] == 200
    lines = [line for line in server.log.splitlines() if "request cmpl-abc-" in line]
    assert len(lines) == 2, server.log
    assert "prompt 'Once'..." in lines[0]
    assert "length, 8 tokens after" in lines[1]
    assert server.stop() == 0
    assert not os.path.exists(socket_path)


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(
    launch: Callable[..., Any], socket_path: str
) -> None:
    first = launch("--uds", socket_path)
    first.wait_for(lambda: os.path.exists(socket_path), "socket")
    second = launch("--uds", socket_path)
    assert second.process.wait(20) == 1
    assert f"--uds {socket_path} is in use" in second.log
    first.stop(signal.SIGKILL)
    assert os.path.exists(socket_path)
    third = launch("--uds", socket_path)
    wait_until_ready(third)
    assert ask(UnixConnection(socket_path), "GET", "/health")[0] == 200
    assert third.stop() == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", paths[1], "-out", paths[0], "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return paths


def test_https_answers_permitted_clients_and_plain_http_fails_cleanly(
    launch: Callable[..., Any], certificate: tuple[str, str]
) -> None:
    server = launch("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    wait_until_ready(server)
    port = int(server.log.partition("is ready on https://127.0.0.1:")[2].split()[0])
    trusting = ssl.create_default_context(cafile=certificate[0])
    for _ in range(2):
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in read_all(plain)
        plain.close()
        status, answer = ask(
            http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=30),
            "POST",
            "/v1/completions",
            BODY,
        )
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 8)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n")
        assert read_all(wrapped).startswith(b"HTTP/1.1 431 ")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(http.client.HTTPSConnection("127.0.0.1", port, timeout=30), "GET", "/health")
    assert "Traceback" not in server.log
    assert server.stop() == 0


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_a_certificate_that_cannot_be_used_ends_the_start_before_anything_is_loaded(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    server = launch("--ssl-certfile", str(bad))
    assert server.process.wait(20) == 2
    assert f"--ssl-certfile {bad}" in server.log
    assert server.log.count("\n") == 1


def test_other_values_of_the_configuration_hold_in_both_processes(serve: Callable[..., Any], gpt2_path: Path) -> None:
    overrides = json.dumps({"n_positions": 64, "n_layer": 1})
    arguments = (
        "--load-format",
        "dummy",
        "--hf-overrides",
        overrides,
        "--max-logprobs",
        "30",
        "--stream-interval",
        "5",
    )
    with serve(str(gpt2_path), *arguments) as server:
        assert server.get_json("/server_info")["engine"]["max_model_len"] == 64
        status, answer, _ = server.post("/v1/completions", {**BODY, "logprobs": 30})
        assert (status, len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) >= 30) == (200, True)
        assert server.post("/v1/completions", {**BODY, "logprobs": 31})[1]["error"]["param"] == "logprobs"
        chunks = list(server.client.completions.create(model=str(gpt2_path), prompt="a", max_tokens=11, stream=True))
        assert len(chunks) <= 3


def connect(server: Any) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def raw_request(body: Any, *, close: bool = False) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = f"{head}Content-Length: {len(content)}"
    return f"{head}\r\n{'Connection: close' + chr(13) + chr(10) if close else ''}\r\n".encode() + content


def test_pipelined_requests_are_answered_in_their_order(demo_server: Any) -> None:
    with connect(demo_server) as connection:
        requests = [raw_request({**BODY, "max_tokens": n, "request_id": f"p{n}"}, close=n == 1) for n in (9, 5, 1)]
        connection.sendall(b"".join(requests))
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    places = [answer.index(f'"id":"cmpl-p{n}"'.encode()) for n in (9, 5, 1)]
    assert places == sorted(places)


def test_connections_that_never_finish_their_request_delay_no_other_client(demo_server: Any) -> None:
    slow = [connect(demo_server) for _ in range(100)]
    try:
        for index, connection in enumerate(slow):
            half = raw_request(BODY)
            connection.sendall(half[: 10 + index])
        assert demo_server.post("/v1/completions", BODY)[0] == 200
        assert demo_server.get_status("/health") == 200
        slow[0].sendall(raw_request(BODY)[10:])
        assert slow[0].recv(12) == b"HTTP/1.1 200"
    finally:
        for connection in slow:
            connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (20 << 20) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["one huge header", "many headers", "a huge path"],
)
def test_headers_without_end_are_refused_unread(demo_server: Any, head: bytes) -> None:
    with connect(demo_server) as connection:
        sender = threading.Thread(target=send_quietly, args=(connection, head))
        sender.start()
        answer = read_all(connection)
        sender.join(30)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert demo_server.get_status("/health") == 200


def send_quietly(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        return  # refused in the middle, as it should be


def test_large_texts_to_tokenize_hold_up_no_stream(demo_server: Any) -> None:
    client: openai.OpenAI = demo_server.client
    model = client.models.list().data[0].id
    answers: list[tuple[int, Any, Any]] = []
    sentence = "Once upon a time there was a little dog. "
    num_sentences = 25_000  # a megabyte, which no prompt of this model can be: it is refused before it is tokenized
    status, refusal, _ = demo_server.post("/tokenize", {"prompt": sentence * num_sentences})
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    while demo_server.post("/tokenize", {"prompt": sentence * num_sentences})[0] != 200:
        num_sentences //= 2

    def tokenize() -> None:
        answers.extend(demo_server.post("/tokenize", {"prompt": sentence * num_sentences}) for _ in range(20))

    def chunks_meanwhile() -> int:
        stream = client.completions.create(
            model=model, prompt="The", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        thread = threading.Thread(target=tokenize)
        thread.start()
        num_meanwhile = sum(thread.is_alive() for _ in chunks)
        thread.join(60)
        return num_meanwhile

    # Again where the engine core stood still meanwhile, as a process of a shared machine may.
    assert any(chunks_meanwhile() >= 10 for _ in range(3))
    assert {status for status, _, _ in answers} == {200}
    assert all(answer["count"] > num_sentences for _, answer, _ in answers)
