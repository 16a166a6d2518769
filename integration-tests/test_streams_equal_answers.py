"""A stream says what the whole answer says: text, tokens, log-probabilities, reasons and usage, for any parameters."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The server is a process: the same examples each time, and no limit on how long one takes.
SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

WORDS = st.sampled_from(["Once", "upon", "a", "time", "the", "fox", "ran", "Ünïcödé", "\N{FOX FACE}", "\n", "and"])
TEXT = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)
STOPS = st.lists(st.sampled_from(["e", " the", "and", ".", "\n", " a", "was", "o"]), min_size=1, max_size=3)


def optional(strategies: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Any choice of the fields."""
    return st.fixed_dictionaries({}, optional=strategies)


SHARED = optional(
    {
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.3, 1, 1.7]),
        "top_p": st.sampled_from([0.1, 0.7, 1]),
        "top_k": st.sampled_from([-1, 1, 5, 50]),
        "min_p": st.sampled_from([0, 0.1]),
        "presence_penalty": st.sampled_from([-1, 0.5, 2]),
        "frequency_penalty": st.sampled_from([-1, 0.5, 2]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "logit_bias": st.dictionaries(st.sampled_from(["5", "50", "260"]), st.integers(-100, 100), max_size=2),
        "stop": STOPS,
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 300), min_size=1, max_size=3),
    }
)
LENGTH = st.integers(3, 14)
COMPLETIONS = st.builds(
    lambda prompt, length, shared, more: {"prompt": prompt, "max_tokens": length, **shared, **more},
    TEXT | st.lists(TEXT, min_size=1, max_size=2) | st.lists(st.integers(0, 250), min_size=1, max_size=8),
    LENGTH,
    SHARED,
    optional({"logprobs": st.integers(0, 4), "echo": st.booleans()}),
)
CHATS = st.builds(
    lambda text, length, shared, more: {
        "messages": [{"role": "user", "content": text}], "max_tokens": length, **shared, **more,
    },
    TEXT,
    LENGTH,
    SHARED,
    st.just({}) | st.integers(0, 4).map(lambda number: {"logprobs": True, "top_logprobs": number}),
)  # fmt: skip


def post(url: str, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def whole_and_stream(url: str, path: str, fields: dict[str, Any], seed: int) -> tuple[Any, list[Any]]:
    body = {**fields, "seed": seed, "return_token_ids": True}
    whole = json.loads(post(url, path, body))
    streamed = post(url, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, end = [event.removeprefix("data: ") for event in streamed.split("\n\n") if event]
    assert end == "[DONE]"
    return whole, [json.loads(chunk) for chunk in chunks]


def usage_of(answer: Any) -> dict[str, int]:
    """The counts; how much of the prompt was in the cache is another matter the second time."""
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def joined_logprobs(pieces: list[Any]) -> Any:
    """The log-probabilities of several chunks as one answer has them; None where no chunk has any."""
    found = [piece for piece in pieces if piece]
    if not found:
        return None
    names = [name for name, value in found[0].items() if isinstance(value, list)]
    return {name: [entry for piece in found for entry in piece[name]] for name in names}


def joined(chunks: list[Any], text_of: Any) -> dict[int, dict[str, Any]]:
    """Choice index to what its chunks say together."""
    index_to_choices: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            index_to_choices[choice["index"]].append(choice)
    return {
        index: {
            "text": "".join(text_of(choice) for choice in choices),
            "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids") or ()],
            "logprobs": joined_logprobs([choice.get("logprobs") for choice in choices]),
            "finish_reason": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "stop_reason": choices[-1].get("stop_reason"),
        }
        for index, choices in index_to_choices.items()
    }


def check_equal(whole: Any, chunks: list[Any], whole_text: Any, chunk_text: Any) -> None:
    assert chunks[-1]["choices"] == []
    assert usage_of(chunks[-1]) == usage_of(whole)
    streamed = joined(chunks, chunk_text)
    assert sorted(streamed) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        found = streamed[choice["index"]]
        assert found["text"] == whole_text(choice)
        assert found["token_ids"] == choice["token_ids"]
        assert found["logprobs"] == joined_logprobs([choice["logprobs"]])
        assert found["finish_reason"] == [choice["finish_reason"]]
        assert found["stop_reason"] == choice.get("stop_reason")


@SETTINGS
@given(fields=COMPLETIONS, seed=st.integers(0, 2**31))
def test_completions(demo_server: Any, fields: dict[str, Any], seed: int) -> None:
    whole, chunks = whole_and_stream(demo_server.url, "/v1/completions", fields, seed)
    check_equal(whole, chunks, lambda choice: choice["text"], lambda choice: choice["text"])


@SETTINGS
@given(fields=CHATS, seed=st.integers(0, 2**31))
def test_chat_completions(demo_server: Any, fields: dict[str, Any], seed: int) -> None:
    whole, chunks = whole_and_stream(demo_server.url, "/v1/chat/completions", fields, seed)
    check_equal(
        whole,
        chunks,
        lambda choice: choice["message"]["content"] or "",
        lambda choice: choice["delta"].get("content") or "",
    )
