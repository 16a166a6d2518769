"""`/v1/decisions` over the fake engine: questions, answers, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_helpers.gaps import front_end

from llmstack_llm import GenerationRequest, RenderedPrompt
from llmstack_server.apis.decisions.questions import LABELS, Option, Question
from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

PREDICATE = {"type": "predicate", "name": "late", "instructions": "The parcel is late."}
CHOICE = {
    "type": "choice", "instructions": "Who answers?",
    "choices": [{"value": "sales"}, {"value": "help", "description": "for questions"}, {"value": True}],
}  # fmt: skip
SCORE = {"type": "score", "name": "mood", "instructions": "The mood?", "levels": [{"label": "good"}, {"label": "bad"}]}


@pytest.fixture
def engine() -> FakeEngineClient:
    made = FakeEngineClient()
    made.limits = dataclasses.replace(made.limits, max_model_len=512)
    return made


@pytest.fixture
def app(engine: FakeEngineClient) -> Any:
    return build_app(ready_state(engine))


async def ask(app: Any, *questions: Any, **fields: Any) -> Answer:
    return await call(app, "POST", "/v1/decisions", {"input": "Where is it?", "questions": [*questions], **fields})


async def test_each_question_is_answered_by_the_probabilities_of_its_letters(
    app: Any, engine: FakeEngineClient
) -> None:
    engine.script = "A"
    answer = await ask(app, PREDICATE, CHOICE, SCORE)
    assert answer.status == 200, answer.body
    body = answer.json()
    # The fake engine gives the letter it says -0.5, and the others -1.5, -2.5 and so on.
    shares = [math.exp(-0.5), math.exp(-1.5), math.exp(-2.5)]
    two, three = (sum(shares[:2]), sum(shares))
    assert body["model"] == "fake"
    late, who, mood = body["answers"]
    assert late == {"type": "predicate", "name": "late", "probability": pytest.approx(shares[1] / two)}
    assert (who["type"], who["name"], who["choice"]) == ("choice", None, "sales")
    assert [one["value"] for one in who["probabilities"]] == ["sales", "help", True]
    assert [one["probability"] for one in who["probabilities"]] == pytest.approx([one / three for one in shares])
    assert who["confidence"] == pytest.approx(shares[0])
    assert (mood["score"], mood["name"]) == (pytest.approx(shares[1] / two), "mood")
    assert [(one["value"], one["label"]) for one in mood["probabilities"]] == [(0, "good"), (1, "bad")]
    num_tokens = sum(len(one.prompt_token_ids) for one in engine.admitted)
    assert body["usage"] == {
        "input_tokens": num_tokens, "output_tokens": 3, "total_tokens": num_tokens + 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": num_tokens},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


async def test_prompts_begin_with_the_input_and_end_in_the_letters(app: Any, engine: FakeEngineClient) -> None:
    await ask(app, CHOICE, PREDICATE)
    first, second = (one.prompt or "" for one in engine.admitted)
    assert first.startswith("Where is it?\n\nQuestion: Who answers?\nA. sales\nB. help: for questions\nC. true\n")
    assert second.startswith("Where is it?\n\nQuestion: The parcel is late.\nA. false\nB. true\n")
    params = engine.admitted[0].sampling_params
    assert params.logprob_token_ids == tuple(map(ord, "ABC"))
    assert (params.max_tokens, params.temperature, params.repetition_penalty) == (1, 0.0, 1.0)
    assert engine.rendered[-1].template_kwargs == {"enable_thinking": False, "thinking": False}


async def test_messages_are_one_text(app: Any, engine: FakeEngineClient) -> None:
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c", "prompt_cache_breakpoint": {}}]
    messages = [{"role": "user", "content": "a"}, {"type": "message", "role": "user", "content": parts}]
    question = {**PREDICATE, "instructions": parts}
    assert (await ask(app, question, input=messages, prompt_cache_key="k", safety_identifier="me")).status == 200
    assert (engine.admitted[-1].prompt or "").startswith("a\n\nb\nc\n\nQuestion: b\nc\n")


async def test_the_others_wait_for_the_prefix_of_the_first(
    app: Any, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = engine.submit, []

    async def noting(*requests: GenerationRequest) -> Any:
        calls.append((len(requests), engine.num_running))
        return await submit(*requests)

    monkeypatch.setattr(engine, "submit", noting)
    assert (await ask(app, *[PREDICATE] * 5)).status == 200
    assert (await ask(app, PREDICATE)).status == 200
    assert calls == [(1, 0), (4, 0), (1, 0)]


def choices(number: int) -> dict[str, Any]:
    return {**CHOICE, "choices": [{"value": str(value)} for value in range(number)]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [{"role": "system", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "unsupported_value"),
        ({"questions": None}, "questions", "missing_required_parameter"),
        ({"questions": []}, "questions", "empty_array"),
        ({"questions": [PREDICATE] * 65}, "questions", "array_above_max_length"),
        ({"questions": [3]}, "questions[0]", "invalid_type"),
        ({"questions": [{"instructions": "x"}]}, "questions[0].type", "missing_required_parameter"),
        ({"questions": [{**PREDICATE, "type": "noul"}]}, "questions[0].type", "invalid_value"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing_required_parameter"),
        ({"questions": [PREDICATE, {**PREDICATE, "weight": 2}]}, "questions[1].weight", "unknown_parameter"),
        ({"questions": [{**CHOICE, "choices": 3}]}, "questions[0].choices", "invalid_type"),
        ({"questions": [choices(1)]}, "questions[0].choices", "invalid_value"),
        ({"questions": [choices(27)]}, "questions[0].choices", "array_above_max_length"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
         "questions[0].choices", "invalid_value"),
        ({"questions": [{**CHOICE, "choices": [{"value": 3}, {"value": "a"}]}]},
         "questions[0].choices[0].value", "invalid_type"),
        ({"questions": [{**CHOICE, "choices": [{"value": "b", "description": 0}, {"value": "a"}]}]},
         "questions[0].choices[0].description", "invalid_type"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}] * 11}]}, "questions[0].levels", "array_above_max_length"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"stream": True}, "stream", "unknown_parameter"),
        ({"temperature": 0}, "temperature", "unknown_parameter"),
        ({"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length"),
        ({"input": "x" * (1 << 20), "questions": [PREDICATE] * 17}, "input", "request_budget_exceeded"),
    ],
)  # fmt: skip
async def test_an_error_names_its_part(
    app: Any, engine: FakeEngineClient, fields: dict[str, Any], param: str, code: str
) -> None:
    error = (await ask(app, PREDICATE, **fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert engine.admitted == []


async def test_prompts_are_counted_before_they_are_made(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object, **__: object) -> str:
        raise AssertionError("64 copies of a text of megabytes")

    monkeypatch.setattr(Question, "prompt", make)
    error = (await ask(app, *[PREDICATE] * 17, input="x" * (1 << 20))).json()["error"]
    assert (error["param"], error["code"]) == ("input", "request_budget_exceeded")


async def test_equal_values_of_two_types_are_two_choices(app: Any) -> None:
    both = {**CHOICE, "choices": [{"value": True}, {"value": "true"}]}
    values = [one["value"] for one in (await ask(app, both)).json()["answers"][0]["probabilities"]]
    assert values == [True, "true"]


@given(st.lists(st.floats(-100, 0), min_size=2, max_size=len(LABELS)), st.sampled_from(["choice", "score"]))
def test_probabilities_are_those_of_the_logits(logprobs: list[float], kind: Any) -> None:
    options = tuple(Option(number, str(number)) for number in range(len(logprobs)))
    answer = Question(kind, "?", None, options).answer(logprobs)
    shares = [one["probability"] for one in answer["probabilities"]]
    assert math.fsum(shares) == pytest.approx(1.0)
    total = math.fsum(map(math.exp, logprobs))
    assert shares == pytest.approx([math.exp(one) / total for one in logprobs])
    assert answer["confidence"] == math.exp(max(logprobs))
    if kind == "score":
        assert 0 <= answer["score"] <= len(options) - 1


async def test_without_a_template_the_letter_continues_the_prompt(tmp_path: Path) -> None:
    async with front_end(tmp_path / "m", [" A", " B"]) as (llm, client):
        letters = [llm.tokenizer.token_to_id(token) for token in (" A", " B")]
        client.engine.output_token_ids = [letters[0]]
        answer = await ask(build_app(ready_state(llm, ready=client.ready)), PREDICATE)
        assert answer.json()["answers"][0]["probability"] == pytest.approx(1 / (1 + math.e))
        [request] = client.added
        assert llm.tokenizer.decode(request.prompt_token_ids).endswith("one letter alone.\nAnswer:")
        assert request.sampling_params.logprob_token_ids == tuple(letters)


async def test_an_operator_may_end_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_end(tmp_path / "m", [" A", " B"]) as (llm, client):
        submit = llm.submit

        async def ended(*requests: GenerationRequest) -> Any:
            outputs = await submit(*requests)
            await llm.abort([one.request_id for one in requests])
            return outputs

        monkeypatch.setattr(llm, "submit", ended)
        answer = await ask(build_app(ready_state(llm, ready=client.ready)), PREDICATE)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_a_question_may_have_all_letters(tmp_path: Path) -> None:
    letters = [f" {letter}" for letter in LABELS]
    async with front_end(tmp_path / "m", letters) as (llm, client):
        client.engine.output_token_ids = [llm.tokenizer.token_to_id(letters[-1])]
        answer = await ask(build_app(ready_state(llm, ready=client.ready)), choices(len(LABELS)))
        [found] = answer.json()["answers"]
        assert (found["choice"], len(found["probabilities"])) == ("25", len(LABELS))


async def test_a_letter_must_be_a_token_at_the_start_of_an_answer(tmp_path: Path) -> None:
    async with front_end(tmp_path / "m", [" A"]) as (llm, client):
        error = (await ask(build_app(ready_state(llm, ready=client.ready)), PREDICATE)).json()["error"]
        assert (error["param"], "the letter B is no token" in error["message"]) == ("model", True)
        assert client.added == []


async def test_an_answer_that_begins_with_reasoning_is_refused(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = engine.render

    async def thinking(*arguments: Any) -> RenderedPrompt:
        prompt = await render(*arguments)
        return dataclasses.replace(prompt, text=f"{prompt.text}<think>\n")

    app = build_app(ready_state(engine, chat=ChatOptions(reasoning_parser="deepseek_r1")))
    assert (await ask(app, PREDICATE)).status == 200
    monkeypatch.setattr(engine, "render", thinking)
    error = (await ask(app, PREDICATE)).json()["error"]
    assert (error["param"], "begin with reasoning" in error["message"]) == ("model", True)
