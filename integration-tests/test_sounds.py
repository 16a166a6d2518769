"""Sound in chats over HTTP: the tokens of transformers, hits, other doors, refusals, and engines that are killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import sound_model
from media_chats import NUM_TOKENS, OPTIONS, ask, check_answers, check_killed_core, check_second_request, tokens
from model_folders import model_folder
from sound_model import RATE, SECONDS, SoundReference, audio_url, input_audio, parts, sound, wav

ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (1, 0), (3, 2)]
LONG = wav(np.zeros(int((SECONDS + 0.5) * RATE)))


folder = model_folder(sound_model.save_sound_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    made = SoundReference(folder)
    return {seeds: made.answer(seeds, NUM_TOKENS) for seeds in ASKED}


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(folder), *OPTIONS, "--max-num-batched-tokens", "23", "--limit-mm-per-prompt", '{"audio": 3}') as one:
        yield one


def test_answers_are_those_of_transformers_alone_together_and_again(server: Any, reference: Any) -> None:
    assert len({tuple(found) for found in reference.values()}) == len(reference)
    details = check_answers(server, parts, reference, 3)
    assert details.audio_tokens == 32 + 62  # 130 and 250 frames, of which four are a vector


def test_the_second_request_with_a_sound_costs_a_hash(server: Any) -> None:
    facts = check_second_request(server, parts, ["encoder_units", "encoder_items"], 7, 11)
    assert facts["encoder_units"] == SECONDS * 50


def test_tokens_of_sounds_are_counted_and_nothing_is_encoded(server: Any) -> None:
    messages = [{"role": "user", "content": parts((22,))}]
    encoded = server.metric("llmstack:encoder_units_total")
    _, tokenized, _ = server.post("/tokenize", {"model": "m", "messages": messages})
    status, estimated, _ = server.post("/v1/estimate", {"model": "m", "messages": messages})
    assert server.metric("llmstack:encoder_units_total") == encoded
    expected = ask(server, messages[0]["content"]).usage.prompt_tokens
    assert tokenized["count"] == expected
    assert status == 503 or estimated["prompt_tokens"] == expected  # too few steps may have been measured


def test_a_sound_has_many_forms_and_a_name(server: Any, reference: Any) -> None:
    file = wav(sound(0))
    url = audio_url(file)["audio_url"]["url"]
    data = sound_model.base64_of(file)
    forms: list[Any] = [
        {"type": "audio_url", "audio_url": url}, {"audio_url": url}, {"audio_url": {"url": url}},
        {"input_audio": {"data": data, "format": "wav"}}, {"type": "audio", "audio": url},
        {**input_audio(file, "mp3"), "uuid": "mine"}, {"type": "input_audio", "input_audio": None, "uuid": "mine"},
    ]  # fmt: skip
    text = parts(())[-1]
    assert [tokens(ask(server, [form, text])) for form in forms] == [reference[(0,)]] * len(forms)
    assert tokens(ask(server, [text["text"], *parts((0,))[:1]])) != reference[(0,)]  # the order is kept
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, [{"type": "audio_url", "audio_url": None, "uuid": "another"}])
    assert caught.value.code == "media_not_found"


REFUSED: list[tuple[Any, str, str]] = [
    (audio_url(b"no sound at all"), "", "unsupported_media_format"),
    (input_audio(wav(sound(0))[:40]), "", "invalid_audio"),
    (input_audio(wav(np.zeros(800))), "", "audio_too_short"),
    (input_audio(LONG), "", "audio_too_long"),
    (input_audio(wav(np.zeros(9000), 999)), "", "invalid_audio"),
    ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "", "invalid_audio"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, ".input_audio.format", "missing_required_parameter"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, ".input_audio.data", "missing_required_parameter"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "midi"}}, ".input_audio.format",
     "invalid_value"),
    ({"type": "input_audio", "input_audio": "AAAA"}, ".input_audio", "invalid_type"),
    ({"type": "audio_url", "audio_url": "http://127.0.0.1/a.wav"}, "", "media_url_not_allowed"),
    ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "", "media_url_not_allowed"),
    ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, ".type", "unsupported_parameter"),
    ({"type": "image_embeds", "image_embeds": "AAAA"}, ".type", "unsupported_parameter"),
]  # fmt: skip


def test_what_is_no_sound_is_refused_by_name(server: Any) -> None:
    encoded = server.metric("llmstack:encoder_items_total")
    for part, field, code in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, [part])
        assert (caught.value.param, caught.value.code) == (f"messages[0].content[0]{field}", code), caught.value
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, parts((0, 1, 2, 3)))
    assert (caught.value.param, caught.value.code) == ("messages[0].content[3]", "too_many_images")
    assert server.metric("llmstack:encoder_items_total") == encoded


def test_headers_that_say_another_length_are_not_believed(server: Any, reference: Any) -> None:
    file = wav(sound(0))
    text = parts(())[-1]
    for size in (0, 0xFFFFFFFF):
        odd = file[:40] + size.to_bytes(4, "little") + file[44:]
        assert tokens(ask(server, [input_audio(odd), text])) == reference[(0,)]


def test_a_message_that_spells_the_symbol_is_text(server: Any) -> None:
    for content in ("what is <|AUDIO|>?", [{"type": "text", "text": "what is <|AUDIO|>?"}]):
        assert ask(server, content).usage.prompt_tokens_details.audio_tokens in (0, None)


def test_the_example_of_the_page_runs(server: Any, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "speech.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if '"type": "input_audio"' in block]
    (tmp_path / "jfk.wav").write_bytes(wav(sound(0)))
    (tmp_path / "example.py").write_text(code.replace("http://localhost:8000", server.url))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip().endswith("64"), (done.stdout, done.stderr)


def test_responses_answer_about_sounds_as_the_chat_does(server: Any) -> None:
    chat = ask(server, parts((0, 1)))
    sounds = [input_audio(wav(sound(seed))) for seed in (0, 1)]
    asked: Any = [{"role": "user", "content": [*sounds, {"type": "input_text", "text": sound_model.QUESTION}]}]
    fields: Any = {"model": "m", "temperature": 0, "max_output_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    response = server.client.responses.create(input=asked, **fields)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    again = server.client.responses.create(previous_response_id=response.id, input="and now?", **fields)
    assert again.usage.input_tokens > chat.usage.prompt_tokens  # the sounds of the turn before are still there
    status, answer, _ = server.post("/v1/responses", {"model": "m", "input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, input_audio(LONG)]}]})  # fmt: skip
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input[0].content[1]", "audio_too_long")


@pytest.mark.full
def test_a_batch_answers_as_the_server_does(folder: Path, reference: Any, tmp_path: Path) -> None:
    body = {"model": "m", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    bodies = {str(seeds): {**body, "messages": [{"role": "user", "content": parts(seeds)}]} for seeds in ASKED}
    bodies["long"] = {**body, "messages": [{"role": "user", "content": [input_audio(LONG)]}]}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": one}
        for name, one in bodies.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "llmstack_command", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model",
               str(folder), "--dtype", "float32", "--served-model-name", "m"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    written = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    answers = {line["custom_id"]: line["response"] for line in written}
    assert answers.pop("long")["body"]["error"]["code"] == "audio_too_long"
    found = {name: one["body"]["choices"][0]["token_ids"] for name, one in answers.items()}
    assert found == {str(seeds): tokens for seeds, tokens in reference.items()}


@pytest.mark.full
def test_a_killed_engine_core_costs_no_token(folder: Path, serve: Callable[..., Any], reference: Any) -> None:
    with serve(str(folder), *OPTIONS, "--max-num-batched-tokens", "16") as server:
        check_killed_core(server, parts, reference)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2")])
def test_two_ranks_give_the_same_tokens(
    ranks: tuple[str, ...], folder: Path, serve: Callable[..., Any], reference: Any
) -> None:
    with serve(str(folder), *OPTIONS, *ranks) as server:
        assert {seeds: tokens(ask(server, parts(seeds))) for seeds in reference} == reference
