"""What a first user tries, on SmolLM2 under its registered name. Real weights: words are asserted, not texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_models import smollm2_file

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SEEDED = {"model": "smollm2", "seed": 1}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """Variables with which the model's distribution is installed for a process."""
    return {"PYTHONPATH": str(smollm2_file().parent.parent)}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], installed: dict[str, str]) -> Iterator[Any]:
    """A server for which no model is named."""
    with serve("--max-model-len", "2048", env={**installed, "LLMSTACK_MODEL": ""}) as server:
        yield server


def test_the_server_says_which_model_it_took_and_with_which_defaults(server: Any):
    assert "no model was named: serving smollm2 (SmolLM2-135M-Instruct), as installed" in server.log
    assert (
        "the registration of smollm2 sets sampling defaults: temperature=0.2, top_p=0.9, repetition_penalty=1.1"
        in server.log
    )
    info = server.get_json("/server_info")
    assert info["served_model_names"] == ["smollm2"]
    assert info["sampling_defaults"] == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


def test_a_question_is_answered_and_the_answer_ends(server: Any):
    answer = server.client.chat.completions.create(messages=CAPITAL, **SEEDED)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|" not in answer.choices[0].message.content


def test_a_system_prompt_is_followed(server: Any):
    system = {"role": "system", "content": "You are a pirate who talks like a pirate."}
    question = {"role": "user", "content": "Who are you?"}
    found = [
        server.client.chat.completions.create(messages=messages, **SEEDED).choices[0].message.content
        for messages in ([system, question], [question])
    ]
    at_sea = [bool(re.search(r"\b(aye|ahoy|arr+|matey|ye|seas?|ship|pirate)\b", text.lower())) for text in found]
    assert at_sea == [True, False], found


def test_a_stream_has_the_text_of_the_answer(server: Any):
    whole = server.client.chat.completions.create(messages=CAPITAL, **SEEDED).choices[0].message.content
    chunks = list(server.client.chat.completions.create(messages=CAPITAL, stream=True, **SEEDED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_by_a_schema_is_what_it_describes(server: Any):
    answer = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "Give me a person with name and age."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        **SEEDED,
    )
    person = json.loads(answer.choices[0].message.content)
    assert (type(person["name"]), type(person["age"]), len(person)) == (str, int, 2)


def test_a_named_tool_is_called_with_the_city_of_the_question(server: Any):
    answer = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **SEEDED,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert "Paris" in json.loads(call.function.arguments)["city"]


def test_an_answer_by_an_expression_matches_it(server: Any):
    expression = "2024-[01][0-9]-[0-3][0-9]"
    status, answer, _ = server.post(
        "/v1/chat/completions",
        {**SEEDED, "messages": [{"role": "user", "content": "A date?"}], "structured_outputs": {"regex": expression}},
    )
    assert status == 200
    assert re.fullmatch(expression, answer["choices"][0]["message"]["content"])


def test_log_probabilities_favour_the_right_word(server: Any):
    answer = server.client.chat.completions.create(messages=CAPITAL, logprobs=True, top_logprobs=2, **SEEDED)
    tokens = answer.choices[0].logprobs.content
    (paris,) = [token for token in tokens if token.token == " Paris"][:1]
    assert paris.logprob > -1
    assert len(paris.top_logprobs) == 2


def test_a_prompt_is_continued(server: Any):
    answer = server.client.completions.create(prompt="The Eiffel Tower is in the city of", max_tokens=8, **SEEDED)
    assert "Paris" in answer.choices[0].text


def test_sentences_on_one_subject_have_closer_embeddings_than_others(server: Any):
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by two percent."]
    found = server.client.embeddings.create(input=texts, model="smollm2").data
    cat, kitten, rates = (entry.embedding for entry in found)

    def product(one: list[float], other: list[float]) -> float:
        return sum(left * right for left, right in zip(one, other, strict=True))

    assert product(cat, cat) == pytest.approx(1, abs=1e-3)
    assert product(cat, kitten) > max(product(cat, rates), product(kitten, rates))


def test_an_answer_is_explained(server: Any, installed: dict[str, str]):
    answer = server.client.chat.completions.create(messages=CAPITAL, max_tokens=4, **SEEDED)
    command = [sys.executable, "-m", "llmstack_command", "explain", "--url", server.url, answer.id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "It decoded in " in done.stdout


def test_defaults_yield_to_an_option_of_the_server(serve: Callable[..., Any], installed: dict[str, str]):
    line = ["smollm2", "--generation-config", "vllm", "--override-generation-config", '{"top_k": 5}']
    line += ["--served-model-name", "small", "--max-model-len", "256"]
    with serve(*line, env=installed) as server:
        assert server.get_json("/server_info")["sampling_defaults"] == {"top_k": 5}
        assert [model["id"] for model in server.get_json("/v1/models")["data"]] == ["small"]


def test_the_name_opens_the_model_offline(installed: dict[str, str]):
    program = (
        "from llmstack_llm import LLM\n"
        "llm = LLM('smollm2', max_model_len=512, num_kv_blocks=64)\n"
        "print(llm.get_default_sampling_params().repetition_penalty)\n"
        "print(llm.chat([{'role': 'user', 'content': 'What is the capital of France?'}])[0].outputs[0].text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True,
        env={**os.environ, **installed},
    )  # fmt: skip
    penalty, text = done.stdout.split("\n", 1)
    assert (penalty, "Paris" in text) == ("1.1", True)
