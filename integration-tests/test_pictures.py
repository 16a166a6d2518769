"""Pictures over HTTP: the tokens of transformers, hits, refusals that cost no decode, and engines that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import picture_model
import pytest
from media_chats import NUM_TOKENS, OPTIONS, ask, check_answers, check_killed_core, check_second_request, tokens
from model_folders import model_folder
from picture_model import data_url, parts, picture, reference_answer, reference_vector

ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (1, 0), ()]


folder = model_folder(picture_model.save_picture_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    return {seeds: reference_answer(folder, seeds, NUM_TOKENS) for seeds in ASKED if seeds}


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(folder), *OPTIONS, "--max-num-batched-tokens", "48") as one:
        yield one


def test_answers_are_those_of_transformers_alone_together_and_again(server: Any, reference: Any) -> None:
    details = check_answers(server, parts, reference, 4)
    assert details.image_tokens == 2 * 5 * 4  # four crops and the whole picture, 4 each


def test_the_limits_are_said(server: Any) -> None:
    [model] = server.get_json("/v1/models")["data"]
    assert model["chat"]["pictures"] == {"max_items": 64, "max_bytes": 25 << 20, "max_pixels": 50_000_000}


def test_vectors_are_those_of_transformers(folder: Path, server: Any) -> None:
    for seeds in ((0,), (0, 1)):
        body = {"model": "m", "messages": [{"role": "user", "content": parts(seeds)}], "encoding_format": "float"}
        for _ in range(2):  # then from the prefix cache
            status, answer, _ = server.post("/v1/embeddings", body)
            assert status == 200, answer
            vector = answer["data"][0]["embedding"]
            np.testing.assert_allclose(vector, reference_vector(folder, seeds), atol=2e-5)


def test_the_second_request_with_a_picture_costs_a_hash(server: Any) -> None:
    facts = check_second_request(server, parts, ["encoder_units", "encoder_items", "media_decode_cpu_seconds"], 7, 8)
    assert facts["encoder_units"] == 5 * 16  # five crops of 4 × 4 patches


@pytest.mark.parametrize(
    ("content", "param", "code"),
    [
        ([{"type": "image_url", "image_url": "http://127.0.0.1/a.png"}], "content[0]", "media_url_not_allowed"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "content[0]", "media_url_not_allowed"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "content[0]",
         "unsupported_media_format"),
        ([{"type": "image_url", "image_url": None, "uuid": "unknown"}], "content[0]", "media_not_found"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], "content[0].type", "unsupported_parameter"),
        (parts((0,) * 65), "content[64]", "too_many_images"),
        ([{"type": "image_embeds", "image_embeds": "AAAA"}], "content[0].type", "unsupported_parameter"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_by_name(server: Any, content: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, content)
    assert (caught.value.param, caught.value.code) == (f"messages[0].{param}", code)


def claude_image(seed: int) -> dict[str, Any]:
    media_type, data = data_url(picture(seed))[len("data:") :].split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def message(server: Any, *blocks: Any) -> tuple[int, Any]:
    body = {"model": "m", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    status, answer, _ = server.post("/v1/messages", {**body, "messages": [{"role": "user", "content": [*blocks]}]})
    return status, answer


def test_other_apis_answer_about_pictures_as_the_chat_does(server: Any) -> None:
    chat = ask(server, parts((0, 1)))
    question = parts(())[0]["text"]
    status, answer = message(server, claude_image(0), claude_image(1), {"type": "text", "text": question})
    assert (status, answer["content"][0]["text"]) == (200, chat.choices[0].message.content)
    images = [{"type": "input_image", "image_url": data_url(picture(seed)), "detail": "auto"} for seed in (0, 1)]
    asked = [{"role": "user", "content": [*images, {"type": "input_text", "text": question}]}]
    fields: Any = {"model": "m", "temperature": 0, "max_output_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    response = server.client.responses.create(input=asked, **fields)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    again = server.client.responses.create(previous_response_id=response.id, input="and now?", **fields)
    with_pictures = again.usage.input_tokens
    assert with_pictures > chat.usage.prompt_tokens  # the pictures of the turn before are still there


def test_a_picture_in_the_result_of_a_call_is_seen(server: Any) -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    counts = []
    for blocks in ([], [claude_image(0)]):
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, *blocks]}
        turns = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        status, answer, _ = server.post("/v1/messages/count_tokens", {"model": "m", "messages": turns})
        assert status == 200, answer
        counts.append(answer["input_tokens"])
    (plain, chat) = (ask(server, parts(seeds)).usage.prompt_tokens for seeds in ((), (0,)))
    assert counts[1] - counts[0] == chat - plain


def test_other_apis_name_the_field_of_a_picture(server: Any) -> None:
    foreign = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    status, answer = message(server, {"type": "text", "text": "a"}, foreign)
    assert status == 400
    assert answer["error"]["message"].startswith("messages[0].content[1]: ")
    output = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    items = [{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": output}]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        status, answer, _ = server.post(path, {"model": "m", "input": items})
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, "input[1].output[0]", "unsupported_media_format")


def test_tokens_of_pictures_are_counted_and_nothing_is_encoded(server: Any) -> None:
    content = parts((21,))
    messages = [{"role": "user", "content": content}]
    encoded = server.metric("llmstack:encoder_units_total")
    _, tokenized, _ = server.post("/tokenize", {"model": "m", "messages": messages})
    blocks = [claude_image(21), content[1]]
    claude = [{"role": "user", "content": blocks}]
    _, counted, _ = server.post("/v1/messages/count_tokens", {"model": "m", "messages": claude})
    status, estimated, _ = server.post("/v1/estimate", {"model": "m", "messages": messages})
    assert server.metric("llmstack:encoder_units_total") == encoded
    expected = ask(server, content).usage.prompt_tokens
    assert (tokenized["count"], counted["input_tokens"]) == (expected, expected)
    assert status == 503 or estimated["prompt_tokens"] == expected  # too few steps may have been measured


def test_a_prompt_with_pictures_is_not_rendered_as_token_ids_alone(server: Any) -> None:
    message = {"role": "user", "content": parts((0,))}
    status, answer, _ = server.post("/v1/chat/completions/render", {"model": "m", "messages": [message]})
    assert (status, answer["error"]["code"]) == (400, "unsupported_value")


def test_a_bomb_is_refused_from_its_header(server: Any) -> None:
    url = data_url(picture(0).convert("1").resize((9000, 9000)))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, [{"type": "image_url", "image_url": {"url": url}}])
    assert caught.value.code == "image_too_large"


def test_what_becomes_of_pictures_is_counted(server: Any) -> None:
    names = ("lookup_hits_total", "bytes_total", "fetches_total", "failures_total", "decode_cpu_seconds_total")
    broken = [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]

    def ask_both() -> None:
        ask(server, parts((40,)))
        with pytest.raises(openai.BadRequestError):
            ask(server, broken)

    ask_both()
    before = {name: server.metric(f"llmstack:media_{name}") for name in names}
    ask_both()
    grown = {name: server.metric(f"llmstack:media_{name}") - before[name] for name in names}
    assert grown.pop("bytes_total") > 3  # of the broken one
    assert grown.pop("decode_cpu_seconds_total") >= 0  # a time: that nothing is decoded again is a lookup's hit
    assert before["decode_cpu_seconds_total"] > 0
    assert grown == {"lookup_hits_total": 1, "fetches_total": 2, "failures_total": 1}


def test_a_message_that_spells_the_symbol_is_text(server: Any, reference: Any) -> None:
    for content in ("what is <image>?", [{"type": "text", "text": "what is <image>?"}]):
        answer = ask(server, content)
        assert len(tokens(answer)) == NUM_TOKENS
        assert answer.usage.prompt_tokens_details.image_tokens in (0, None)
    beside = ask(server, [*parts((0,))[:1], {"type": "text", "text": "<image>"}])
    alone = ask(server, parts((0,), ""))
    assert beside.usage.prompt_tokens - alone.usage.prompt_tokens == len("<image>")  # its bytes, and no special token
    assert beside.usage.prompt_tokens_details.image_tokens == alone.usage.prompt_tokens_details.image_tokens


def test_a_placeholder_without_its_picture_is_refused_where_it_is_a_token(server: Any) -> None:
    _, tokenized, _ = server.post("/tokenize", {"model": "m", "prompt": "a<image>"})
    assert len(tokenized["tokens"]) == 2
    _, whole, _ = server.post("/tokenize", {"model": "m", "messages": [{"role": "user", "content": parts((0,))}]})
    for prompt in ("a<image>", tokenized["tokens"], [tokenized["tokens"]], whole["tokens"]):
        status, answer, _ = server.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})
        error = answer["error"]
        assert (status, error["param"].partition("[")[0], error["code"]) == (400, "prompt", "invalid_value")
        assert "'<image>'" in error["message"]
    body = {"model": "m", "prompt": "<row_1_col_1>", "max_tokens": 1}
    assert server.post("/v1/completions", body)[0] == 200  # a special token that no vector replaces


@pytest.mark.full
def test_a_killed_engine_core_costs_no_token(folder: Path, serve: Callable[..., Any], reference: Any) -> None:
    with serve(str(folder), *OPTIONS, "--max-num-batched-tokens", "16") as server:
        check_killed_core(server, parts, reference)


@pytest.mark.full
def test_drafts_change_no_token(folder: Path, serve: Callable[..., Any]) -> None:
    asked = [(0,), (0, 1), (1, 0)]
    expected = {seeds: reference_answer(folder, seeds, 40) for seeds in asked}
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--speculative-config", drafts)
    with serve(str(folder), *arguments, "--max-num-batched-tokens", "48") as server:
        found = {seeds: tokens(ask(server, parts(seeds), max_tokens=40)) for seeds in [*asked, *asked]}
        assert found == expected
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.full
@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2")])
def test_two_ranks_give_the_same_tokens(
    ranks: tuple[str, ...], folder: Path, serve: Callable[..., Any], reference: Any
) -> None:
    with serve(str(folder), *OPTIONS, *ranks) as server:
        assert {seeds: tokens(ask(server, parts(seeds))) for seeds in reference} == reference
