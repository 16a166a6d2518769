"""Server-sent events."""

from __future__ import annotations

import io

import pytest

from llmstack_command.client.events import error_text, read_events
from llmstack_command.errors import ApiError


def test_events_are_the_objects_up_to_done():
    stream = io.BytesIO(b': hello\n\ndata: {"a":1}\n\ndata:{"a":2}\r\n\r\ndata: [DONE]\n\ndata: {"a":3}\n\n')
    assert [event["a"] for event in read_events(stream)] == [1, 2]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b'data: {"a":1}\n\n', "is incomplete"),
        (b"data: {oops\n\n", "is not JSON"),
        (b"data: []\n\n", "is not an object"),
        (b'data: {"error":{"message":"Internal\\nerror","code":"internal_error"}}\n\n', "Internal error"),
    ],
)
def test_a_stream_that_is_none_says_why(stream: bytes, words: str):
    with pytest.raises(ApiError, match=words):
        list(read_events(io.BytesIO(stream)))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no", "code": "x"}}, ("no", "x")),
        ({"error": "just text"}, ("just text", None)),
        ({"message": "no", "code": 404}, ("no", None)),
        ({"error": None}, ("", None)),
        (None, ("", None)),
        ([], ("", None)),
    ],
)
def test_the_words_of_an_error_are_found_in_every_servers_form(body: object, text: tuple[str, str | None]):
    assert error_text(body) == text
