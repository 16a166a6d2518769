"""Published facts about known models, through the whole stack: GPT-2's token ids and stories260k's greedy text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TRUE_TOKEN_IDS = {
    "Hello": [15496],
    "Today's weather is": [8888, 338, 6193, 318],
    "Once upon a time": [7454, 2402, 257, 640],
    "Hello, my name is": [15496, 11, 616, 1438, 318],
    " John": [1757],
    " Smith": [4176],
    " world! How are you?": [995, 0, 1374, 389, 345, 30],
    "Hello, how are you?": [15496, 11, 703, 389, 345, 30],
    "The future of AI is": [464, 2003, 286, 9552, 318],
    "Hello world": [15496, 995],
    "Goodbye": [10248, 16390],
}


@pytest.fixture(scope="module")
def gpt2_server(serve: Callable[..., Any], gpt2_path: Path) -> Iterator[Any]:
    with serve(
        "--model", str(gpt2_path), "--load-format", "dummy", "--served-model-name", "gpt2", "gpt-2-alias"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def stories_server(serve: Callable[..., Any], stories_path: Path) -> Iterator[Any]:
    with serve(str(stories_path)) as server:
        yield server


@pytest.mark.parametrize("text", TRUE_TOKEN_IDS)
def test_gpt2_tokenizes_as_published(gpt2_server: Any, text: str) -> None:
    answer = gpt2_server.client.completions.create(
        model="gpt2", prompt=text, max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra["prompt_token_ids"] == TRUE_TOKEN_IDS[text]
    assert answer.usage.prompt_tokens == len(TRUE_TOKEN_IDS[text])


def test_gpt2_answers_chat_through_the_plain_fallback(gpt2_server: Any) -> None:
    answer = gpt2_server.client.chat.completions.create(
        model="gpt2", messages=[{"role": "user", "content": "Hello"}], temperature=0.7, max_tokens=4
    )
    assert answer.usage.prompt_tokens == 1
    assert answer.model == "gpt2"


def test_every_served_name_reaches_the_model(gpt2_server: Any) -> None:
    names = [m.id for m in gpt2_server.client.models.list().data]
    assert names == ["gpt2", "gpt-2-alias"]
    answer = gpt2_server.client.completions.create(model="gpt-2-alias", prompt="Hello", max_tokens=1)
    assert answer.model in names


def test_end_of_text_in_chat_content_is_text_and_not_control(gpt2_server: Any) -> None:
    answer = gpt2_server.client.chat.completions.create(
        model="gpt2",
        messages=[{"role": "user", "content": "<|endoftext|>"}],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    assert 50256 not in answer.model_extra["prompt_token_ids"]
    assert answer.usage.prompt_tokens > 1


def golden(stories_path: Path) -> dict[str, Any]:
    return json.loads((stories_path / "golden.json").read_text())


def test_stories260k_reproduces_its_published_text(stories_server: Any, stories_path: Path) -> None:
    published = golden(stories_path)["published"]
    answer = stories_server.client.completions.create(
        model=stories_server.client.models.list().data[0].id,
        prompt=published["prompt_token_ids"],
        max_tokens=len(published["output_token_ids"]),
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert answer.choices[0].model_extra["token_ids"] == published["output_token_ids"]
    assert answer.choices[0].text.strip() == published["text"].strip()


def test_stories260k_streams_its_published_text(stories_server: Any, stories_path: Path) -> None:
    published = golden(stories_path)["published"]
    stream = stories_server.client.completions.create(
        model=stories_server.client.models.list().data[0].id,
        prompt=published["prompt_token_ids"],
        max_tokens=len(published["output_token_ids"]),
        temperature=0,
        stream=True,
    )
    assert "".join(chunk.choices[0].text for chunk in stream).strip() == published["text"].strip()


def test_stories260k_equals_transformers_on_text_prompts(stories_server: Any, stories_path: Path) -> None:
    cases = golden(stories_path)["greedy_from_transformers_float32"]
    assert cases
    for case in cases:
        answer = stories_server.client.completions.create(
            model=stories_server.client.models.list().data[0].id,
            prompt=case["prompt_token_ids"],
            max_tokens=len(case["output_token_ids"]),
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert answer.choices[0].model_extra["token_ids"] == case["output_token_ids"]
