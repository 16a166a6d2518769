"""Pictures whose encoder is that of transformers, over HTTP: its tokens, hits, and an engine that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import picture_model
import pytest
import torch
import transformers
from picture_model import QUESTION, TEMPLATE, TEXT, parts, picture

pytestmark = pytest.mark.full
NUM_TOKENS = 12
ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (1, 0)]
GRIDS = [[64, 128], [128, 64], [128, 128]]
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 64, "patch_size": 16, "vision_use_head": False, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaVA-OneVision; its processor as a whole needs torchvision to be made."""
    path: Path = tmp_path_factory.mktemp("pictures") / "model"
    tokenizer = picture_model.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    text = {**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer), "pad_token_id": ids("<|endoftext|>")}
    config = transformers.LlavaOnevisionConfig(
        text_config=text, vision_config=TOWER, image_token_index=ids("<image>"), image_grid_pinpoints=GRIDS,
        video_token_index=ids("<global-img>"), vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[ids("<image>")] = 0  # no output is a picture
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 64, "width": 64}, image_grid_pinpoints=GRIDS
    ).save_pretrained(path)
    (path / "processor_config.json").write_text('{"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"}')
    return path


def reference_answer(folder: Path, seeds: Sequence[int]) -> list[int]:
    model = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    inputs = images([picture(seed) for seed in seeds], return_tensors="pt")
    with torch.no_grad():
        vectors = model.get_image_features(**inputs).pooler_output
    content = [*({"type": "image"} for _ in seeds), {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    first, *rest = prompt.split("<image>")
    prompt = first + "".join("<image>" * len(one) + text for one, text in zip(vectors, rest, strict=True))
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**tokens, **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    found: list[int] = output[0, tokens["input_ids"].shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    return {seeds: reference_answer(folder, seeds) for seeds in ASKED}


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-num-batched-tokens", "48")
    with serve(str(folder), *arguments) as one:
        yield one


def ask(server: Any, seeds: Sequence[int]) -> Any:
    return server.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": parts(seeds)}], temperature=0, max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip


def tokens(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


def test_answers_are_those_of_transformers_alone_together_and_again(server: Any, reference: Any) -> None:
    assert len({tuple(found) for found in reference.values()}) == len(reference)
    assert {seeds: tokens(ask(server, seeds)) for seeds in reference} == reference
    encoded = server.metric("llmstack:encoder_items_total")
    found = ask(server, (0, 1))
    assert tokens(found) == reference[0, 1]
    assert found.usage.prompt_tokens_details.cached_tokens > 0
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda seeds: tokens(ask(server, seeds)), [*reference] * 4))
    assert many == [*reference.values()] * 4
    assert server.metric("llmstack:encoder_items_total") == encoded


def test_a_killed_engine_core_costs_no_token(folder: Path, serve: Callable[..., Any], reference: Any) -> None:
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-num-batched-tokens", "16")
    with serve(str(folder), *arguments) as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, server, seeds) for seeds in [*reference] * 4]
        server.wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, "the first tokens")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [tokens(one.result()) for one in waiting] == [*reference.values()] * 4


def test_two_ranks_give_the_same_tokens(folder: Path, serve: Callable[..., Any], reference: Any) -> None:
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m", "-pp", "2") as server:
        assert {seeds: tokens(ask(server, seeds)) for seeds in reference} == reference
