"""Vectors in place of pictures: the tokens of the pictures themselves, beside pictures, in an LLM, and refusals."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import picture_model
import pytest
import safetensors.torch
import torch
from model_folders import model_folder
from picture_model import QUESTION, data_url, picture, reference_features

from llmstack_llm.offline.llm import LLM
from llmstack_types import SamplingParams

NUM_TOKENS = 8


folder = model_folder(picture_model.save_picture_model)


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    options = ("--dtype", "float32", "--served-model-name", "m", "--enable-mm-embeds")
    with serve(str(folder), *options) as one:
        yield one


def ask(server: Any, *content: Any) -> tuple[int, Any]:
    body = {
        "model": "m", "messages": [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}],
        "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    status, answer, _ = server.post("/v1/chat/completions", body)
    return status, answer if status != 200 else (answer["usage"]["prompt_tokens"], answer["choices"][0]["token_ids"])


def shown(seed: int) -> dict[str, Any]:
    """A picture in one piece, as the vectors are."""
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed)), "detail": "low"}}


def given(vectors: torch.Tensor) -> dict[str, Any]:
    file = safetensors.torch.save({"image_embeds": vectors.contiguous()})
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file).decode()}


def test_vectors_are_answered_as_the_pictures_that_they_are_of(folder: Path, server: Any) -> None:
    vectors = [reference_features(folder, picture(seed)) for seed in (0, 1)]
    expected = {seeds: ask(server, *map(shown, seeds)) for seeds in ((0,), (1,), (0, 1))}
    assert {status for status, _ in expected.values()} == {200}
    encoded = server.metric("llmstack:encoder_units_total")
    for _ in range(2):  # then from the prefix cache
        assert ask(server, given(vectors[0])) == expected[(0,)]
        assert ask(server, given(vectors[1][None])) == expected[(1,)]
        assert ask(server, given(vectors[0]), shown(1)) == expected[0, 1]
        assert ask(server, shown(0), given(vectors[1])) == expected[0, 1]
    assert server.metric("llmstack:encoder_units_total") == encoded
    assert ask(server, given(2 * vectors[0]))[1][1] != expected[(0,)][1][1]


@pytest.mark.parametrize(("part", "field", "code"), [
    (given(torch.zeros(4, 9)), ".image_embeds", "invalid_value"),
    (given(torch.zeros(4, 32, dtype=torch.float16)), ".image_embeds", "invalid_value"),
    (given(torch.full((4, 32), torch.nan)), ".image_embeds", "invalid_value"),
    (given(torch.zeros(4000, 32)), ".image_embeds", "context_length_exceeded"),
    ({"type": "image_embeds", "image_embeds": "no file"}, ".image_embeds", "invalid_value"),
    ({"type": "image_embeds", "image_embeds": {"a": 1}}, ".image_embeds", "invalid_type"),
    ({"type": "image_embeds", "uuid": "a"}, ".image_embeds", "missing_required_parameter"),
])  # fmt: skip
def test_what_is_no_vectors_of_the_model_is_named(server: Any, part: Any, field: str, code: str) -> None:
    status, answer = ask(server, shown(0), part)
    assert (status, answer["error"]["param"]) == (400, f"messages[0].content[1]{field}")
    assert answer["error"]["code"] == code
    assert "prompt_embeds" not in answer["error"]["message"]


def test_prompts_of_vectors_alone_have_a_flag_of_their_own(server: Any) -> None:
    status, answer, _ = server.post("/v1/completions", {"model": "m", "prompt_embeds": "AAAA"})
    assert (status, answer["error"]["param"]) == (400, "prompt_embeds")


@pytest.mark.full
def test_an_llm_takes_tensors(folder: Path, server: Any) -> None:
    vectors = reference_features(folder, picture(0))
    text = f"<|im_start|>user\n<image>{QUESTION}<end_of_utterance>\n<|im_start|>assistant\n"
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), dtype="float32", enable_mm_embeds=True) as llm:
        asked = {"prompt": text, "multi_modal_data": {"image": [vectors]}}
        (output,) = llm.generate(asked, sampling, use_tqdm=False)
    assert (len(output.prompt_token_ids), list(output.outputs[0].token_ids)) == ask(server, shown(0))[1]
