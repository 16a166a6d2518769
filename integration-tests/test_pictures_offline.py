"""Pictures in `LLM.chat` and `LLM.generate`: the tokens of transformers, every form of a picture, refusals."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import picture_model
import pytest
from media_chats import GREEDY, NUM_TOKENS, offline_llm
from media_chats import offline_tokens as tokens
from model_folders import model_folder
from picture_model import QUESTION, data_url, parts, picture, reference_answer, reference_vector

from llmstack_llm.offline.llm import LLM
from llmstack_types import InvalidRequestError, SamplingParams

llm = offline_llm
folder = model_folder(picture_model.save_picture_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    return {seeds: reference_answer(folder, seeds, NUM_TOKENS) for seeds in ((0,), (0, 1))}


def prompt(num_pictures: int) -> str:
    return f"<|im_start|>user\n{'<image>' * num_pictures}{QUESTION}<end_of_utterance>\n<|im_start|>assistant\n"


def png(seed: int) -> bytes:
    return base64.b64decode(data_url(picture(seed)).split(",")[1])


def test_conversations_and_prompts_have_the_tokens_of_transformers(llm: LLM, reference: Any, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": parts(seeds)}] for seeds in reference]
    assert tokens(llm.chat(chats, GREEDY, use_tqdm=False)) == [*reference.values()]
    (tmp_path / "a.png").write_bytes(png(0))
    one = [png(0), tmp_path / "a.png", str(tmp_path / "a.png"), picture(0), data_url(picture(0)), [picture(0)]]
    asked = [{"prompt": prompt(1), "multi_modal_data": {"image": given}} for given in one]
    asked.append({"prompt": prompt(2), "multi_modal_data": {"image": [png(0), picture(1)]}})
    expected = [*[reference[(0,)]] * len(one), reference[0, 1]]
    assert tokens(llm.generate(asked, GREEDY, use_tqdm=False)) == expected
    ids = llm.enqueue(asked[-1], GREEDY)
    assert len(ids) == 1
    assert tokens(llm.wait_for_completion(use_tqdm=False)) == [reference[0, 1]]


def test_pictures_of_later_prompts_wait_until_there_is_memory(llm: LLM, reference: Any, monkeypatch: Any) -> None:
    store: Any = llm.llm_engine.input_processor.media.processor
    store = store._front.store
    asked = [{"prompt": prompt(1), "multi_modal_data": {"image": png(seed)}} for seed in (0, 30, 31, 0)]
    alone = [tokens(llm.generate(one, GREEDY, use_tqdm=False))[0] for one in asked]
    largest = max(one.memory.num_bytes for one in store._entries.values())
    monkeypatch.setattr(store._held_bytes, "_limit", largest)
    assert tokens(llm.generate(asked, GREEDY, use_tqdm=False)) == alone


def test_vectors_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    text = prompt(1).removesuffix("<|im_start|>assistant\n")
    asked = [{"prompt": text, "multi_modal_data": {"image": png(0)}}, "no picture"]
    (output, _) = llm.embed(asked, use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, reference_vector(folder, (0,)), atol=2e-5)
    store: Any = llm.llm_engine.input_processor.media.processor
    llm.llm_engine.media._run(asyncio.sleep(0))  # pictures are released on the loop
    assert store._front.store.held_bytes == 0
    with pytest.raises(InvalidRequestError) as caught:
        llm.embed(asked, truncate_prompt_tokens=3, use_tqdm=False)
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(asked[0], SamplingParams(truncate_prompt_tokens=3), use_tqdm=False)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"prompt": prompt(1), "multi_modal_data": {"image": []}}, None, None),
        ({"prompt": prompt(0), "multi_modal_data": {"image": png(0)}}, "prompts[0]", "invalid_value"),
        ({"prompt": prompt(1), "multi_modal_data": {"image": b"no"}}, "prompts[0].multi_modal_data.image",
         "unsupported_media_format"),
        ({"prompt": prompt(2), "multi_modal_data": {"image": [png(0), 7]}}, "prompts[0].multi_modal_data.image[1]",
         "invalid_type"),
        ({"prompt": prompt(1), "multi_modal_data": {"image": "/no/such/file"}}, "prompts[0].multi_modal_data.image",
         "invalid_value"),
        ({"prompt": prompt(1), "multi_modal_data": {"video": [1]}}, "prompts[0].multi_modal_data.video",
         "unsupported_parameter"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": png(0)}}, "prompt_token_ids", "unsupported_parameter"),
        ({"prompt": prompt(65), "multi_modal_data": {"image": [b"x"] * 65}}, "prompts[0].multi_modal_data",
         "too_many_images"),
        (prompt(1), "prompts[0]", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(llm: LLM, asked: Any, param: str | None, code: str | None) -> None:
    if code is None:
        asked = {**asked, "prompt": prompt(0)}
        plain = llm.generate(prompt(0), GREEDY, use_tqdm=False)
        assert tokens(llm.generate(asked, GREEDY, use_tqdm=False)) == tokens(plain)
        return
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(asked, GREEDY, use_tqdm=False)
    assert (caught.value.param, caught.value.code) == (param, code)
