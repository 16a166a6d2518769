"""Items of prompts with several ranks: the same tokens as with one, and an item that fails costs its own request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_helpers.families import FAMILIES, write_family
from parallel_helpers.schedules import NUM_BLOCKS, largest_difference, make_config, run_media
from parallel_helpers.thread_peers import ThreadPeers

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_model_runner.toy_vision import given_item, register_toy_vision, toy_item, write_toy_vision
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EncoderWork, MediaMemory, QuarantinedError, SamplingParams

FEW = ("gpt2", "opt", "gemma 3", "llama with one kv head")
EACH = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
RANKS: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
PICTURE, OTHER = bytes(range(0, 144, 4)), bytes(range(1, 81))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(register_toy_vision(folder / "registered")))
        yield write_toy_vision(folder / "model", max_position_embeddings=64)


def test_several_ranks_encode_and_place_the_vectors_that_one_does(toy: Path) -> None:
    items = [toy_item(PICTURE, 2), toy_item(OTHER, 12, num_breaks=1)]
    alone = run_media(make_config(toy), items, seed=1)
    assert len(set(alone.outputs["request-0"])) > 2
    assert run_media(make_config(toy), [toy_item(OTHER[:36], 2), items[1]], seed=1).outputs != alone.outputs
    shared = run_media(make_config(toy, tensor_parallel_size=2), items, seed=1)
    assert largest_difference(alone, shared) < 1e-4
    staged = run_media(make_config(toy, pipeline_parallel_size=2), items, seed=1)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    ["idefics3", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma 3", "qwen 2.5 vl", "qwen 3 vl"))],
)
@pytest.mark.parametrize("ranks", RANKS, ids=["tensor", "pipeline"])
def test_a_tower_of_each_rank_makes_the_vectors_that_one_does(name: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from model_runner_helpers.picture_families import FAMILIES as PICTURE_FAMILIES
    from model_runner_helpers.picture_families import prepare

    family = PICTURE_FAMILIES[name]
    family.write(tmp_path)
    whole = family.ours().for_detail("low")
    items = [replace(prepare(whole, (40, 30), seed).item, offset=2 + 15 * seed) for seed in range(2)]
    alone = run_media(make_config(tmp_path), items, seed=1)
    assert run_media(make_config(tmp_path), [replace(items[1], offset=2), items[1]], seed=1).outputs != alone.outputs
    assert largest_difference(alone, run_media(make_config(tmp_path, **ranks), items, seed=1)) < 1e-4


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("ranks", RANKS, ids=["tensor", "pipeline"])
@pytest.mark.parametrize("name", ["qwen 2.5 vl", "qwen 3 vl"])
def test_ranks_see_the_video_that_one_does(name: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from model_runner_helpers.picture_families import FAMILIES as PICTURE_FAMILIES
    from model_runner_helpers.picture_families import prepare, prepare_video

    family = PICTURE_FAMILIES[name]
    family.write(tmp_path)
    picture = replace(prepare(family.ours().for_detail("low"), (40, 30), 0).item, offset=1)
    video = replace(prepare_video(family.ours_of_videos(), (30, 30), 4, 1.0, 1).item, offset=11)
    alone = run_media(make_config(tmp_path), [picture, video], seed=1)
    assert largest_difference(alone, run_media(make_config(tmp_path, **ranks), [picture, video], seed=1)) < 1e-4


@pytest.mark.parametrize("name", EACH)
def test_vectors_of_tokens_are_as_good_as_the_tokens_in_every_family(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", name)
    config = make_config(folder, enable_prompt_embeds=True)
    token_ids = [(7 * place + 3) % 90 for place in range(9)]
    alone = ModelRunner(config)
    alone.load_model()
    table = alone._model._tokens  # type: ignore[union-attr]  # every family has one
    with torch.inference_mode():
        given = given_item(table(torch.tensor(token_ids)).clone(), 4)
    by_tokens = run_media(config, [], seed=2, token_ids=token_ids)
    by_vectors = run_media(config, [given], seed=2)
    assert (by_vectors.outputs, by_vectors.logprobs) == (by_tokens.outputs, by_tokens.logprobs)
    shared = run_media(replace(config, tensor_parallel_size=2), [given], seed=2)
    assert largest_difference(by_tokens, shared) < 1e-4
    staged = run_media(replace(config, pipeline_parallel_size=2), [given], seed=2)
    assert (staged.outputs, staged.logprobs) == (by_tokens.outputs, by_tokens.logprobs)


@pytest.mark.parametrize("ranks", RANKS, ids=["tensor", "pipeline"])
def test_an_item_that_fails_costs_its_own_request_alone(toy: Path, tmp_path: Path, ranks: dict[str, Any]) -> None:
    items = {"good": toy_item(PICTURE, 2), "bad": toy_item(PICTURE, 2, path=str(tmp_path / "gone"))}
    expected = run_media(make_config(toy), [items["good"]], seed=3).outputs["request-0"]
    runner = ParallelRunner(make_config(toy, **ranks), ThreadPeers)
    try:
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        driver = StepDriver(runner, NUM_BLOCKS)  # type: ignore[arg-type]  # it has the methods of one
        prompt = [(7 * place + 3) % 90 for place in range(18)]
        for media_id, (name, item) in enumerate(items.items(), 1):
            driver.add(name, prompt, SamplingParams(temperature=0.0), media=((media_id, item),))
        work = [EncoderWork(media_id, 0, 3, item) for media_id, item in enumerate(items.values(), 1)]
        driver.step({"good": 2, "bad": 2}, encoder_work=work)
        driver.step({"good": 16, "bad": 16})
        assert driver.errors == {"bad": QuarantinedError.MEDIA_UNREADABLE}
        driver.remove("bad")
        while len(driver.outputs["good"]) < len(expected):
            driver.step({"good": 1})
        assert driver.outputs["good"] == expected
    finally:
        runner.shutdown()


def test_vectors_that_one_stage_alone_finds_not_finite_end_the_request(toy: Path) -> None:
    item = toy_item(PICTURE, 2)
    bad = replace(item, kind="image", memory=MediaMemory(3, data=b"odd"))
    runner = ParallelRunner(make_config(toy, pipeline_parallel_size=2), ThreadPeers)
    try:
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        driver = StepDriver(runner, NUM_BLOCKS)  # type: ignore[arg-type]  # it has the methods of one
        driver.add("bad", list(range(18)), SamplingParams(temperature=0.0), media=((1, bad),))
        driver.add("text", list(range(18)), SamplingParams(temperature=0.0))
        driver.step({"bad": 18, "text": 18}, encoder_work=[EncoderWork(1, 0, 3, bad)])
        assert list(driver.errors) == ["bad"]
        assert len(driver.outputs["text"]) == 1
    finally:
        runner.shutdown()
