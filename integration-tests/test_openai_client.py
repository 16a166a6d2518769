"""The unmodified `openai` client against the demo model, as `llmstack serve` starts it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

PROMPT = "Once upon a time"


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    return demo_server.client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_models_list_names_the_demo_model(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.object for m in models] == ["model"]
    assert client.models.retrieve(models[0].id).id == models[0].id


def test_a_completion_returns_text_and_usage(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_completion_concatenates_to_the_whole_one(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_chat_completion_answers_as_the_assistant(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    chunks = list(
        client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_several_prompts_and_choices_are_numbered_in_prompt_order(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=["The fox", "The queen"], n=2, max_tokens=4, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_token_id_prompts_equal_their_text(client: openai.OpenAI, model: str, demo_server: Any) -> None:
    text = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    token_ids = text.choices[0].model_extra["prompt_token_ids"]
    again = client.completions.create(model=model, prompt=token_ids, max_tokens=8, temperature=0)
    both = client.completions.create(model=model, prompt=[token_ids, token_ids], max_tokens=8, temperature=0)
    assert again.choices[0].text == text.choices[0].text
    assert [c.text for c in both.choices] == [text.choices[0].text] * 2
    assert len(text.choices[0].model_extra["token_ids"]) == 8


def test_a_seed_repeats_and_the_choices_of_one_seed_differ(client: openai.OpenAI, model: str) -> None:
    def sample(**extra: Any) -> list[str]:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=1, **extra)
        return [c.text for c in answer.choices]

    assert sample(seed=42) == sample(seed=42)
    assert len(set(sample(seed=42, n=3))) == 3


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    for stream in (False, True):
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=30, temperature=0, stop=stop, stream=stream
        )
        if stream:
            chunks = list(answer)
            text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"


def test_logprobs_have_the_completions_form(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(PROMPT)
    assert logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[1:])


def test_chat_logprobs_have_the_chat_form(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"repetition_penalty": 1},  # log-probabilities are those before penalties
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in content)


def test_penalties_and_bias_change_the_choice(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**arguments, extra_body={"return_token_ids": True}).choices[0]
    first = plain.model_extra["token_ids"][0]
    biased = client.completions.create(
        **arguments, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}
    ).choices[0]
    assert first not in biased.model_extra["token_ids"]
    penalised = client.completions.create(**arguments, frequency_penalty=2, presence_penalty=2).choices[0]
    assert penalised.text != plain.text


def test_a_repeated_prompt_is_read_from_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    prompt = "The old woman lived in a house at the edge of the wood, and every evening she lit a lamp. " * 3
    first = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
    second = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert second.choices[0].text == first.choices[0].text


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="no-such-model", prompt=PROMPT)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad_request:
        client.completions.create(model=model, prompt=PROMPT, n=1000)
    assert bad_request.value.param == "n"
    assert bad_request.value.code == "integer_above_max_value"
