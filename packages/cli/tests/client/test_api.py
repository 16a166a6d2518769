"""The client against a server that answers, refuses or is not there."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from llmstack_command.client.address import Address
from llmstack_command.client.api import ApiClient
from llmstack_command.errors import ApiError


def client_of(server: Any, api_key: str | None = None) -> ApiClient:
    return ApiClient(Address.parse(server.url), api_key)


def test_it_lists_the_models(server: Any):
    assert client_of(server).model_names() == ["first-model", "second-model"]


def test_a_stream_yields_its_events(server: Any):
    events = list(client_of(server, "secret").stream("/completions", {"prompt": "one two", "temperature": 0.5}))
    assert [choice["text"] for event in events for choice in event["choices"] if "text" in choice] == ["one", " two"]
    path, headers, body = server.requests[0]
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"prompt": "one two", "temperature": 0.5, "stream": True}


def test_leaving_a_stream_closes_its_connection(server: Any):
    server.gate.clear()
    events = client_of(server).stream("/completions", {"prompt": "one two three"})
    assert next(events)["choices"]
    events.close()
    assert server.has_lost_reader.wait(60)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, {"error": {"message": "Incorrect API key provided."}}), ["Incorrect API key", "--api-key"]),
        ((404, {"error": {"message": "The model `x` does not exist.", "code": "model_not_found"}}), ["`x`"]),
        ((503, {"error": {"message": "The server is shutting down."}}), ["shutting down"]),
        ((502, b"<html>Bad Gateway</html>"), ["HTTP 502", "/v1"]),
    ],
)
def test_a_refusal_has_the_message_of_the_server(server: Any, refusal: tuple[int, Any], words: list[str]):
    server.refusal = refusal
    with pytest.raises(ApiError) as raised:
        next(client_of(server).stream("/completions", {"prompt": "one"}))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("models", [{"data": []}, {"models": [1]}, [], b"no JSON"])
def test_a_list_that_names_no_model_is_no_list(server: Any, models: Any):
    server.models = models
    with pytest.raises(ApiError, match="lists no model"):
        client_of(server).model_names()


def test_a_stream_without_its_end_is_incomplete(server: Any):
    server.tail = b""
    with pytest.raises(ApiError, match="is incomplete"):
        list(client_of(server).stream("/completions", {"prompt": "one"}))


def test_a_server_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ApiError, match=rf"no server at http://127.0.0.1:{port}/v1"):
        ApiClient(Address.parse(f"http://127.0.0.1:{port}")).model_names()


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(ApiError, match="unknown host"):
        ApiClient(Address.parse("http://no..such..host")).model_names()


def test_what_does_not_speak_http_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        client = ApiClient(Address.parse(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        connection_closed = pytest.raises(ApiError, match="closed the connection")

        def answer_nonsense() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        import threading

        thread = threading.Thread(target=answer_nonsense)
        thread.start()
        with connection_closed:
            client.model_names()
        thread.join()
