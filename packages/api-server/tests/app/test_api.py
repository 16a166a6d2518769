"""What clients see of the generating routes, over the fake engine and over `AsyncLLM` with an echoing engine core."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(params=["fake", "async_llm"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield build_app(ready_state(FakeEngineClient(), names=("fake", "alias")))
        return
    folder = write_model_folder(tmp_path / "model")
    core = FakeEngineCoreClient()
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    yield build_app(ready_state(engine, names=("fake", "alias"), ready=core.ready))
    await engine.shutdown()


async def complete(app: Any, **fields: Any) -> Answer:
    return await call(app, "POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 7, "temperature": 0, **fields})


async def chat(app: Any, **fields: Any) -> Answer:
    return await call(app, "POST", CHAT, {"messages": HELLO, "max_tokens": 7, "temperature": 0, **fields})


def choices(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    return answer.json()["choices"]


async def test_a_completion_has_every_required_key(app: Any):
    answer = (await complete(app)).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    assert answer["choices"] == [
        {
            "index": 0, "text": "HelloHe", "logprobs": None, "finish_reason": "length", "stop_reason": None,
            "prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None,
        }
    ]  # fmt: skip
    assert (answer["service_tier"], answer["kv_transfer_params"]) == ("default", None)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_has_every_required_key(app: Any):
    answer = (await chat(app)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "HelloHe", "refusal": None}
    assert (choice["logprobs"], choice["finish_reason"], choice["token_ids"]) == (None, "length", None)
    assert answer["usage"]["total_tokens"] == 12
    assert [answer[name] for name in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")] == [None] * 3
    assert answer["service_tier"] == "default"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hi", ["HiHi"]),
        (["Hi", "yo"], ["HiHi", "yoyo"]),
    ],
)
async def test_text_prompts_come_one_or_several(app: Any, prompt: Any, texts: list[str]):
    assert [c["text"] for c in choices(await complete(app, prompt=prompt, max_tokens=4))] == texts


async def test_token_id_prompts_equal_their_text(app: Any):
    whole = choices(await complete(app, return_token_ids=True))[0]
    ids = whole["prompt_token_ids"]
    assert len(ids) == 5
    assert len(whole["token_ids"]) == 7
    assert choices(await complete(app, prompt=ids))[0]["text"] == whole["text"]
    assert [c["text"] for c in choices(await complete(app, prompt=[ids, ids]))] == [whole["text"]] * 2


async def test_choices_are_numbered_over_prompts_and_n(app: Any):
    answer = await complete(app, prompt=["ab", "cd"], n=2, max_tokens=2, temperature=1)
    assert [(c["index"], c["text"]) for c in choices(answer)] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert answer.json()["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("fields", [{"model": None}, {"model": "fake"}, {"model": "alias"}])
async def test_the_model_may_be_left_out_and_has_aliases(app: Any, fields: dict[str, Any]):
    answer = await complete(app, **fields)
    assert answer.status == 200
    assert answer.json()["model"] == (fields["model"] or "fake")


async def test_the_default_is_sixteen_tokens_for_completions_and_the_rest_of_the_context_for_chat(app: Any):
    assert (await complete(app, max_tokens=None)).json()["usage"]["completion_tokens"] == 16
    assert (await chat(app, max_tokens=None)).json()["usage"]["completion_tokens"] == 128 - 5
    assert (await complete(app, max_tokens=None, prompt="x" * 120)).json()["usage"]["completion_tokens"] == 8


async def test_max_completion_tokens_wins(app: Any):
    assert (await chat(app, max_tokens=9, max_completion_tokens=3)).json()["usage"]["completion_tokens"] == 3


async def test_echo_puts_the_prompt_before_the_text(app: Any):
    assert choices(await complete(app, echo=True))[0]["text"] == "HelloHelloHe"
    ids = choices(await complete(app, return_token_ids=True))[0]["prompt_token_ids"]
    assert choices(await complete(app, echo=True, prompt=ids))[0]["text"] == "HelloHelloHe"


async def test_echo_without_new_tokens_scores_the_prompt(app: Any):
    answer = await complete(app, echo=True, max_tokens=0, logprobs=1)
    choice = choices(answer)[0]
    assert choice["text"] == "Hello"
    assert choice["logprobs"]["tokens"] == list("Hello")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * 4]
    assert answer.json()["usage"]["completion_tokens"] == 0


async def test_logprobs_have_the_form_of_completions(app: Any):
    logprobs = choices(await complete(app, logprobs=2, echo=True))[0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "HelloHelloHe"
    assert logprobs["text_offset"] == list(range(12))
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"][1:])


async def test_every_streamed_choice_repeats_the_prompt_with_its_logprobs(app: Any):
    answer = await complete(app, logprobs=1, echo=True, n=2, temperature=1, seed=1, stream=True)
    firsts = {}
    for event in answer.events()[:-1]:
        firsts.setdefault(event["choices"][0]["index"], event["choices"][0])
    assert sorted(firsts) == [0, 1]
    for choice in firsts.values():
        assert choice["text"].startswith("Hello")
        assert choice["logprobs"]["tokens"][:5] == list("Hello")
        assert choice["logprobs"]["token_logprobs"][:5] == [None, *[-0.5] * 4]


async def test_no_top_logprobs_still_name_the_chosen_token(app: Any):
    logprobs = choices(await complete(app, logprobs=0))[0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [1] * 7
    assert logprobs["tokens"] == list("HelloHe")


async def test_chat_logprobs_have_the_form_of_chat(app: Any):
    content = choices(await chat(app, logprobs=True, top_logprobs=2))[0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("HelloHe")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["bytes"] == [72]
    bare = choices(await chat(app, logprobs=True))[0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 7


async def test_the_bytes_of_chat_logprobs_make_up_the_text_where_tokens_are_parts_of_characters(app: Any):
    messages = [{"role": "user", "content": "é"}]
    choice = choices(await chat(app, messages=messages, max_tokens=4, logprobs=True))[0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "éé"
    assert [entry["token"] for entry in entries] == ["\ufffd"] * 4
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "éé"


async def test_prompt_logprobs_come_beside_the_choice(app: Any):
    entries = choices(await complete(app, prompt_logprobs=1))[0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == 5
    assert set(next(iter(entries[1].values()))) == {"logprob", "rank", "decoded_token"}


async def test_a_stream_is_framed_to_the_byte(app: Any):
    answer = await complete(app, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert b"".join(answer.parts).endswith(b"\n\ndata: [DONE]\n\n")
    frames = answer.body.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    first = json.loads(frames[0].removeprefix(b"data: "))
    assert set(first) == {"id", "object", "created", "model", "choices"}
    assert first["choices"] == [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"n": 3, "temperature": 1}, {"prompt": ["ab", "cde"], "n": 2}])
async def test_a_streamed_completion_concatenates_to_the_whole_one(app: Any, fields: dict[str, Any]):
    fields = {"temperature": 1, "seed": 1, **fields}
    whole = choices(await complete(app, **fields))
    events = (await complete(app, **fields, stream=True)).events()
    assert events.pop() == "[DONE]"
    for choice in whole:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own][:-1] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    assert len({e["id"] for e in events}) == 1


async def test_the_last_chunk_carries_text_and_finish_reason(app: Any):
    last = (await complete(app, stream=True)).events()[-2]["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("e", "length")
    last = (await chat(app, stream=True)).events()[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({"content": "e"}, "length")


async def test_a_chat_stream_starts_with_one_role_chunk_per_choice(app: Any):
    events = (await chat(app, stream=True, n=2, temperature=1)).events()[:-1]
    roles = [event["choices"][0] for event in events[:2]]
    assert [choice["index"] for choice in roles] == [0, 1]
    assert all(choice["delta"] == {"role": "assistant", "content": "", "refusal": None} for choice in roles)
    for index in (0, 1):
        own = [e["choices"][0]["delta"].get("content", "") for e in events if e["choices"][0]["index"] == index]
        assert "".join(own) == "HelloHe"
    assert all(event["object"] == "chat.completion.chunk" for event in events)


@pytest.mark.parametrize("post", [complete, chat])
async def test_usage_comes_last_and_only_when_asked_for(app: Any, post: Any):
    plain = (await post(app, stream=True)).events()[:-1]
    assert all("usage" not in event for event in plain)
    empty = (await post(app, stream=True, stream_options={})).events()[:-1]
    assert all("usage" not in event for event in empty)
    counted = (await post(app, stream=True, stream_options={"include_usage": True})).events()[:-1]
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 7
    assert [event["usage"] for event in counted[:-1]] == [None] * (len(counted) - 1)


async def test_best_of_returns_n_choices_and_counts_the_tokens_of_all(tmp_path: Path):
    folder = write_model_folder(tmp_path / "model")
    core = FakeEngineCoreClient()
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    app = build_app(ready_state(engine, ready=core.ready))
    for answer in (await complete(app, n=2, best_of=5, temperature=1), await chat(app, n=2, best_of=5, temperature=1)):
        assert [choice["index"] for choice in choices(answer)] == [0, 1]
        assert all(choice["logprobs"] is None for choice in choices(answer))
        assert answer.json()["usage"]["completion_tokens"] == 35
    assert len(core.added) == 10
    await engine.shutdown()


@pytest.mark.parametrize("post", [complete, chat])
async def test_only_the_end_of_a_stream_names_the_system(app: Any, post: Any):
    whole = (await post(app)).json()["system_fingerprint"]
    for options, num_last in (({}, 1), ({"include_usage": True}, 2)):
        chunks = (await post(app, stream=True, stream_options=options)).events()[:-1]
        assert [chunk["system_fingerprint"] for chunk in chunks[-num_last:]] == [whole] * num_last
        assert all("system_fingerprint" not in chunk for chunk in chunks[:-num_last])


async def test_continuous_usage_counts_up_and_needs_include_usage(app: Any):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await complete(app, stream=True, stream_options=options)).events()[:-1]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 6, 7, 7]
    alone = (await complete(app, stream=True, stream_options={"continuous_usage_stats": True})).events()[:-1]
    assert all("usage" not in event for event in alone)


async def test_a_stream_contains_token_ids_and_logprobs(app: Any):
    events = (await complete(app, stream=True, logprobs=1, return_token_ids=True)).events()[:-1]
    own = [event["choices"][0] for event in events]
    assert len(own[0]["prompt_token_ids"]) == 5
    assert all("prompt_token_ids" not in choice for choice in own[1:])
    assert [offset for choice in own for offset in choice["logprobs"]["text_offset"]] == list(range(7))
    assert sum(len(choice["token_ids"]) for choice in own) == 7
    events = (await chat(app, stream=True, logprobs=True, return_token_ids=True)).events()[:-1]
    assert len(events[0]["prompt_token_ids"]) == 5
    assert all(len(event["choices"][0]["logprobs"]["content"]) == 1 for event in events[1:])


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1},
        {"suffix": None},
        {"suffix": ""},
        {"response_format": {"type": "text"}},
        {"top_k": -1},
        {"top_k": 0},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"user": "me"},
        {"extra_field": 1, "min_characters": 3},
        {"stop": None},
        {"stop": []},
        {"seed": -1},
        {"logit_bias": {}},
        {"bad_words": []},
        {"bad_words": ["zebra", " quick fox"]},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.5},
        {"vllm_xargs": {"target": [1, 2]}},
        {"logit_bias": {"5": 1}},
        {"temperature": 0.0},
        {"stream": False},
        {"stream_options": None},
        {"n": None},
        {"cache_salt": "a"},
        {"priority": 3},
        {"top_p": 1},
        {"skip_special_tokens": False},
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"add_special_tokens": False},
    ],
)
async def test_harmless_fields_are_accepted(app: Any, fields: dict[str, Any]):
    assert choices(await complete(app, **fields))[0]["text"] == "HelloHe"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        [{"role": "my-custom-role", "content": "Hello", "name": "x"}],
    ],
)
async def test_content_parts_and_unknown_roles_reach_the_template(tmp_path: Path, messages: Any):
    folder = write_model_folder(tmp_path / "model")
    core = FakeEngineCoreClient()
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    app = build_app(ready_state(engine, ready=core.ready))
    assert choices(await chat(app, messages=messages))[0]["message"]["content"] == "HelloHe"
    await engine.shutdown()


async def test_tokenize_and_detokenize_are_inverse(app: Any):
    answer = (await call(app, "POST", "/tokenize", {"prompt": "Hello"})).json()
    assert answer["token_strs"] is None
    shown = (await call(app, "POST", "/tokenize", {"prompt": "Hello", "return_token_strs": True})).json()
    assert "".join(shown["token_strs"]) == "Hello"
    parts = (await call(app, "POST", "/tokenize", {"prompt": "é😀", "return_token_strs": True})).json()["token_strs"]
    assert (len(parts), "\ufffd" in "".join(parts)) == (6, False)  # the vocabulary's strings, of a byte each
    assert (answer["count"], answer["max_model_len"]) == (5, 128)
    assert (await call(app, "POST", "/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": "Hello"}
    assert (await call(app, "POST", "/tokenize", {"messages": HELLO})).json()["tokens"] == answer["tokens"]
