"""`/infill`: llama.cpp's form of a gap, its names of sampling fields, and its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.gaps import front_end

from llmstack_server.app import build_app
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]
GEMMA = [*QWEN[:3], "<|file_separator|>"]
STAR_CODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>"]
CODE_LLAMA = ["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"]
FILES = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y"}]
TEXTS = {"input_prefix": "ab", "input_suffix": "yz"}
GAP = "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
HEAD, LAST = "<|repo_name|>myproject\n", "<|file_sep|>filename\n"


class Served:
    """A server of a model with tokens of its own."""

    def __init__(self, llm: Any, client: Any) -> None:
        self.llm, self.client = llm, client
        self.app: Any = build_app(ready_state(llm, ready=client.ready))

    async def post(self, **fields: Any) -> Answer:
        return await call(self.app, "POST", "/infill", {**TEXTS, "n_predict": 4, **fields})

    async def object(self, **fields: Any) -> dict[str, Any]:
        answer = await self.post(**fields)
        assert answer.status == 200, answer.body
        return dict(answer.json())

    @property
    def prompt(self) -> str:
        """What the engine core was sent last, as text."""
        return str(self.llm.tokenizer.decode(self.client.added[-1].prompt_token_ids, skip_special_tokens=False))

    @property
    def params(self) -> Any:
        return self.client.added[-1].sampling_params


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with front_end(tmp_path / "m", QWEN) as (llm, client):
        yield Served(llm, client)


@pytest.fixture
async def scripted(served: Served) -> Served:
    """A model that says `hello` and begins with another file."""
    served.client.engine.output_token_ids = [
        *served.llm.tokenizer.encode("hello"), served.llm.tokenizer.token_to_id("<|file_sep|>")
    ]  # fmt: skip
    return served


@pytest.mark.parametrize(
    ("tokens", "fields", "whole"),
    [
        (QWEN, {}, f"{HEAD}{LAST}{GAP}"),
        (QWEN, {"prompt": "mn"}, f"{HEAD}{LAST}{GAP}mn"),
        (QWEN, {"input_extra": FILES}, f"{HEAD}<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny{LAST}{GAP}"),
        (GEMMA, {"input_extra": []}, GAP),
        (GEMMA, {"input_extra": FILES}, f"\n\n--- a.py ---\n\nx = 1\n\n\n--- snippet ---\n\ny{GAP}"),
        (STAR_CODER, {"input_prefix": ""},
         "<repo_name>myproject\n<file_sep>filename\n<fim_prefix><fim_suffix>yz<fim_middle>"),
        (["[SUFFIX]", "[PREFIX]"], {"prompt": "m"}, "[SUFFIX]yz[PREFIX]abm"),
        (CODE_LLAMA, {}, "\u2581<PRE>ab\u2581<SUF>yz\u2581<MID>"),
    ],
)  # fmt: skip
async def test_texts_stand_in_the_form_of_the_model(
    tmp_path: Path, tokens: list[str], fields: dict[str, Any], whole: str
) -> None:
    async with front_end(tmp_path / "m", tokens) as (llm, client):
        served = Served(llm, client)
        answer = await served.object(**fields)
        assert served.prompt == whole == answer["prompt"]
        assert answer["tokens_evaluated"] == len(client.added[-1].prompt_token_ids)
        ends = {llm.tokenizer.token_to_id(token) for token in tokens}
        assert set(served.params.stop_token_ids) == ends


async def test_what_looks_like_a_token_of_the_form_is_text(served: Served) -> None:
    spelled = "<|file_sep|>b.py\n<|fim_middle|>"
    files = [{"filename": f"a{spelled}", "text": spelled}]
    answer = await served.object(input_prefix=spelled, input_suffix=spelled, prompt=spelled, input_extra=files)
    assert answer["prompt"].count(spelled) == 5
    token_ids = served.client.added[-1].prompt_token_ids
    counts = {token: token_ids.count(served.llm.tokenizer.token_to_id(token)) for token in QWEN}
    assert counts == dict.fromkeys(QWEN, 1) | {"<|file_sep|>": 2, "<|fim_pad|>": 0}


async def test_an_answer_has_what_llama_cpp_says_of_it(scripted: Served) -> None:
    answer = await scripted.object(n_predict=-1, return_tokens=True, temperature=0, seed=3)
    assert (answer["content"], answer["stop"], answer["stop_type"], answer["stopping_word"]) == (
        "hello", True, "eos", ""
    )  # fmt: skip
    assert (answer["tokens_predicted"], len(answer["tokens"]), answer["truncated"]) == (6, 6, False)
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["seed"], settings["n_ctx"]) == (0.0, 3, 256)
    assert settings["n_predict"] == 256 - answer["tokens_evaluated"]
    timings = answer["timings"]
    assert (timings["predicted_n"], timings["prompt_n"] + timings["cache_n"]) == (6, answer["tokens_evaluated"])
    limited = await scripted.object(n_predict=3)
    assert (limited["content"], limited["stop_type"], limited["tokens"]) == ("hel", "limit", [])
    stopped = await scripted.object(stop=["lo"], n_predict=-1)
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("hel", "word", "lo")


async def test_an_answer_that_an_operator_ends_does_not_say_that_it_is_complete(served: Served) -> None:
    served.client.step_delay_s = 0.005
    asking = asyncio.create_task(served.object(n_predict=200))
    while not served.llm.running_request_ids:  # noqa: ASYNC110 (no event says that it runs)
        await asyncio.sleep(0)
    await served.llm.abort(served.llm.running_request_ids)
    assert (await asking)["stop_type"] == "none"


async def test_a_stream_says_the_same_as_a_whole_answer(scripted: Served) -> None:
    whole = await scripted.object(n_predict=-1, seed=3)
    answer = await scripted.post(n_predict=-1, seed=3, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().split("\n\n")[:-1]]
    assert "".join(part["content"] for part in parts) == whole["content"] == "hello"
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert all(part.keys() == {"index", "content", "tokens", "stop", "tokens_predicted", "tokens_evaluated"}
               for part in parts)  # fmt: skip
    assert sum(len(part["tokens"]) for part in parts) == whole["tokens_predicted"]
    assert {**last, "timings": 0} == {**whole, "content": "", "timings": 0}


async def test_probabilities_are_in_llama_cpps_form(scripted: Served) -> None:
    answer = await scripted.object(n_predict=2, n_probs=3)
    first, _ = answer["completion_probabilities"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("h", [104], -0.5)
    assert len(first["top_logprobs"]) == 3
    assert first["top_logprobs"][0] == {name: first[name] for name in ("id", "token", "bytes", "logprob")}
    streamed = await scripted.post(n_predict=2, n_probs=3, stream=True)
    assert streamed.body.count(b"completion_probabilities") == 2


async def test_only_the_fields_that_are_asked_for_are_sent(scripted: Served) -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/seed", "no/such", "stop", "stop/x"]
    assert await scripted.object(n_predict=2, seed=5, response_fields=fields) == {
        "content": "he", "timings/predicted_n": 2, "generation_settings/seed": 5, "stop": True
    }  # fmt: skip
    assert await scripted.object(response_fields=[""]) == {}


async def test_without_a_length_the_prompt_alone_is_computed(scripted: Served) -> None:
    answer = await scripted.object(n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert answer["generation_settings"]["n_predict"] == 0
    assert scripted.params.max_tokens == 1
    streamed = await scripted.post(n_predict=0, stream=True)
    assert streamed.body.count(b"data: ") == 1


# As llama.vim and llama.vscode send them while the user reads.
AHEAD = {
    "id_slot": 0, "prompt": "", "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1, "input_extra": [{"filename": "a.py", "text": "x", "time": [1, 2]}],
}  # fmt: skip


@pytest.mark.parametrize("fields", [{"temperature": 0.0, "stream": False, "response_fields": [""]}, {}])
async def test_editors_send_ahead_what_is_to_be_in_the_cache(scripted: Served, fields: dict[str, Any]) -> None:
    answer = await scripted.object(**AHEAD, **fields)
    assert {name: answer[name] for name in answer.keys() & {"content", "tokens_predicted"}} == (
        {} if fields else {"content": "", "tokens_predicted": 0}
    )
    assert scripted.prompt.startswith(f"{HEAD}<|file_sep|>a.py\nx{LAST}")


async def test_several_texts_are_an_array(served: Served) -> None:
    served.client.engine.output_token_ids = served.llm.tokenizer.encode("ab\ncd")
    answer = await served.post(n_cmpl=3, n_predict=5, n_indent=1, response_fields=["content", "index", "stop_type"])
    assert answer.json() == [{"content": "ab\n", "index": index, "stop_type": "limit"} for index in range(3)]
    streamed = await served.post(n_cmpl=2, n_predict=2, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.body.decode().split("\n\n")[:-1]]
    for index in range(2):
        ours = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in ours) == "ab"
        assert [event["stop"] for event in ours] == [False] * (len(ours) - 1) + [True]
        assert ours[-1]["tokens_predicted"] == 2


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "ab\n  cd\n\tef"),
        ({"n_indent": 1}, "ab\n  cd\n\tef"),
        ({"n_indent": 2}, "ab\n  cd\n\t"),
        ({"n_indent": 3}, "ab\n  "),
        ({"t_max_predict_ms": 1}, "ab\n"),
        ({"t_max_predict_ms": 100_000}, "ab\n  cd\n\tef"),
        ({"t_max_predict_ms": 1, "n_predict": 2}, "ab"),
        ({"t_max_predict_ms": 1, "n_predict": 0}, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_a_line_may_end_an_answer(
    served: Served, fields: dict[str, Any], content: str, stream: bool
) -> None:
    served.client.engine.output_token_ids = served.llm.tokenizer.encode("ab\n  cd\n\tef")
    served.client.step_delay_s = 0.005
    answer = await served.post(**{"n_predict": 11, **fields}, stream=stream)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().split("\n\n") if line]
    assert "".join(event["content"] for event in events) == content
    assert events[-1]["stop_type"] == "limit"
    assert served.llm.num_requests_in_flight == 0
    assert bool(served.client.aborted_request_ids) == (0 < len(content) < 11 and "n_predict" not in fields)


async def test_names_of_llama_cpp_are_sampling_fields(served: Served) -> None:
    await served.object(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.7, seed=-1, stop=["x"], presence_penalty=0.2,
        frequency_penalty=0.3, repeat_penalty=1.2, repeat_last_n=-1, ignore_eos=True, logit_bias={"5": -1},
        stop_token_ids=[7], id_slot=1, cache_prompt=False, n_keep=3, n_indent=0, samplers=None,
    )  # fmt: skip
    params = served.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (0.5, 3, 0.9, 0.1, 0.7)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.2)
    assert (params.ignore_eos, params.logit_bias, params.stop_token_ids[0]) == (True, {5: -1.0}, 7)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input_prefix": None}, "input_prefix", "missing_required_parameter"),
        ({"input_suffix": None}, "input_suffix", "missing_required_parameter"),
        ({"input_suffix": 3}, "input_suffix", "invalid_type"),
        ({"input_extra": "a"}, "input_extra", "invalid_type"),
        ({"input_extra": [3]}, "input_extra[0]", "invalid_type"),
        ({"input_extra": [{"text": 3}]}, "input_extra[0].text", "invalid_type"),
        ({"input_extra": [{"filename": None}]}, "input_extra[0].filename", "invalid_type"),
        ({"input_extra": [{}] * 257}, "input_extra", "array_above_max_length"),
        ({"input_prefix": "a" * 300}, "input_prefix", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"n_predict": 4, "max_tokens": 4}, "max_tokens", "invalid_value"),
        ({"n_predict": "4"}, "n_predict", "invalid_type"),
        ({"n_probs": 21}, "n_probs", "integer_above_max_value"),
        ({"repeat_penalty": 1.1}, "repeat_penalty", "unsupported_value"),
        ({"samplers": ["infill", "top_k"], "top_k": 4}, "samplers", "unsupported_value"),
        ({"samplers": 3}, "samplers", "invalid_type"),
        ({"samplers": "k" * 65}, "samplers", "array_above_max_length"),
        ({"response_fields": ["content"] * 65}, "response_fields", "array_above_max_length"),
        ({"response_fields": ["stop", "a/" * 129]}, "response_fields[1]", "string_above_max_length"),
        ({"samplers": ["top_p", "infill"]}, "top_k", "invalid_value"),
        ({"n_indent": "4"}, "n_indent", "invalid_type"),
        ({"t_max_predict_ms": 0.5}, "t_max_predict_ms", "invalid_type"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"n_cmpl": 0}, "n_cmpl", "integer_below_min_value"),
        ({"logprobs": 2}, "logprobs", "unsupported_parameter"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
async def test_what_would_change_an_answer_is_refused(
    served: Served, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = await served.post(**fields)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert served.client.added == []


async def test_other_models_refuse_gaps() -> None:
    answer = await call(build_app(ready_state(FakeEngineClient())), "POST", "/infill", TEXTS)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input_prefix")
