"""Pictures whose encoder is that of transformers, over HTTP: its tokens, hits, and an engine that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import picture_model
import pytest
import torch
import transformers
from picture_model import QUESTION, TEMPLATE, TEXT, parts, picture
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

pytestmark = pytest.mark.full
NUM_TOKENS = 12
ASKED: list[tuple[int, ...]] = [(0,), (1,), (0, 1), (1, 0)]
GRIDS = [[64, 128], [128, 64], [128, 128]]
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 64, "patch_size": 16, "vision_use_head": False, "initializer_range": 0.2,
}  # fmt: skip
GEMMA_TEXT = TEXT | {
    "model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA_TOWER = {
    "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
    "position_embedding_size": 512, "initializer_range": 0.2,
}  # fmt: skip


class Family(NamedTuple):
    """A class of transformers with pictures.

    Attributes:
        config: By the ids of tokens.
        around: Special tokens before and behind a picture's.
        has_kinds: Whether `generate` reads which tokens are pictures.
        ranks: Options of a second server, which has several ranks.
    """

    class_name: str
    config: Callable[[Callable[[str], int], dict[str, Any]], dict[str, Any]]
    processor: Any
    options: Mapping[str, Any]
    files: Mapping[str, Any]
    around: tuple[str, str] = ("", "")
    has_kinds: bool = False
    ranks: tuple[str, str] = ("-pp", "2")
    batched_tokens: str = "16"


def onevision(ids: Callable[[str], int], text: dict[str, Any]) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, **text, "model_type": "qwen2"}, "vision_config": TOWER,
        "image_token_index": ids("<image>"), "image_grid_pinpoints": GRIDS, "video_token_index": ids("<global-img>"),
        "vision_aspect_ratio": "anyres_max_2",
    }  # fmt: skip


def gemma(**own: Any) -> Callable[[Callable[[str], int], dict[str, Any]], dict[str, Any]]:
    def config(ids: Callable[[str], int], text: dict[str, Any]) -> dict[str, Any]:
        rows = {"vocab_size_per_layer_input": text["vocab_size"]}
        return {
            "text_config": {**GEMMA_TEXT, **text, **rows, **own}, "vision_config": GEMMA_TOWER, "audio_config": None,
            "image_token_id": ids("<image>"), "video_token_id": ids("<row_1_col_1>"),
            "audio_token_id": ids("<row_1_col_2>"), "tie_word_embeddings": False,
        }  # fmt: skip

    return config


AROUND = ("<fake_token_around_image>", "<global-img>")
GEMMA_FILES = {"boi_token": AROUND[0], "image_token": "<image>", "eoi_token": AROUND[1]}
GEMMA_OPTIONS = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
FAMILIES = {
    "llava onevision": Family(
        "LlavaOnevision", onevision, transformers.LlavaOnevisionImageProcessorPil,
        {"size": {"height": 64, "width": 64}, "image_grid_pinpoints": GRIDS},
        {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"},
    ),
    "gemma 4": Family(
        "Gemma4", gemma(use_bidirectional_attention="vision"), Gemma4ImageProcessorPil, GEMMA_OPTIONS, GEMMA_FILES,
        AROUND, has_kinds=True, batched_tokens="400",
    ),
    "gemma 4 with vectors of tokens": Family(
        "Gemma4", gemma(hidden_size_per_layer_input=8, num_kv_shared_layers=2), Gemma4ImageProcessorPil, GEMMA_OPTIONS,
        GEMMA_FILES, AROUND, has_kinds=True, ranks=("-tp", "2"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model; its processor as a whole needs torchvision to be made."""
    path: Path = tmp_path_factory.mktemp("pictures") / "model"
    tokenizer = picture_model.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    text = {"vocab_size": len(tokenizer), "pad_token_id": ids("<|endoftext|>")}
    config = getattr(transformers, f"{family.class_name}Config")(**family.config(ids, text))
    model = model_class(family)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embedding_table"):
                parameter.normal_(std=0.2)
        model.lm_head.weight[ids("<image>")] = 0  # no output is a picture
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    family.processor(**family.options).save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps(family.files))
    return path


def model_class(family: Family) -> Any:
    return getattr(transformers, f"{family.class_name}ForConditionalGeneration")


def reference_answer(family: Family, folder: Path, seeds: Sequence[int]) -> list[int]:
    model = model_class(family).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = family.processor(**family.options)([picture(seed) for seed in seeds], return_tensors="pt")
    inputs.pop("num_soft_tokens_per_image", None)
    with torch.no_grad():
        vectors = model.get_image_features(**inputs).pooler_output
    content = [*({"type": "image"} for _ in seeds), {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    first, *rest = prompt.split("<image>")
    before, behind = family.around
    pictures = [f"{before}{'<image>' * len(one)}{behind}" for one in vectors]
    prompt = first + "".join(one + text for one, text in zip(pictures, rest, strict=True))
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = tokens["input_ids"]
    kinds = {"mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids("<image>")).int()} if family.has_kinds else {}
    output = model.generate(**tokens, **inputs, **kinds, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def reference(family: Family, folder: Path) -> dict[tuple[int, ...], list[int]]:
    return {seeds: reference_answer(family, folder, seeds) for seeds in ASKED}


@pytest.fixture(scope="module")
def server(folder: Path, family: Family, serve: Callable[..., Any]) -> Iterator[Any]:
    batched_tokens = str(max(48, int(family.batched_tokens)))
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-num-batched-tokens", batched_tokens)
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


def test_a_killed_engine_core_costs_no_token(
    family: Family, folder: Path, serve: Callable[..., Any], reference: Any
) -> None:
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-num-batched-tokens", family.batched_tokens)
    with serve(str(folder), *arguments, "--max-queue-wait", "600") as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, server, seeds) for seeds in [*reference] * 4]
        server.wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, "the first tokens")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [tokens(one.result()) for one in waiting] == [*reference.values()] * 4


def test_two_ranks_give_the_same_tokens(
    family: Family, folder: Path, serve: Callable[..., Any], reference: Any
) -> None:
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m", *family.ranks) as server:
        assert {seeds: tokens(ask(server, seeds)) for seeds in reference} == reference
