"""Models with videos compute what transformers does, however items and rows are cut, shared and ordered."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES, PictureFamily, prepare, prepare_video
from model_runner_helpers.picture_prompts import (
    GREEDY,
    NUM_BLOCKS,
    NUM_OUTPUTS,
    Prompt,
    encode,
    expected,
    generate,
    load_model,
    load_runner,
    logits_in_chunks,
)

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.testing import StepDriver
from llmstack_types import MediaItem, ModelRunnerConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
NAMES = ("qwen 3 vl", "qwen 2 vl", "qwen 2.5 vl", "qwen 3 vl with experts", "qwen 3.5")
# One representative; `make test-full` has them all.
EACH = [name if name == NAMES[0] else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
MERGE = 2


@dataclass(frozen=True)
class VideoPrompt(Prompt):
    """Transformers gets the positions too, where it would choose others."""

    has_positions: bool = False

    def all_inputs(self, tokens: list[int]) -> dict[str, Any]:
        found = super().all_inputs(tokens)
        return found | {"position_ids": first_positions(self.items, len(tokens))} if self.has_positions else found


def first_positions(items: Sequence[MediaItem], num_tokens: int) -> torch.Tensor:
    """Positions by the rule of the models' first code: behind an item the largest of its positions, and one more."""
    found: list[tuple[int, int, int]] = []
    for item in items:
        while len(found) < item.offset:
            found.append((1 + max(map(max, found), default=-1),) * 3)
        times, rows, columns = item.layout[0], item.layout[1] // MERGE, item.layout[2] // MERGE
        step = struct.unpack("<f", struct.pack("<I", item.layout[3]))[0] if len(item.layout) > 3 else 1
        start = 1 + max(map(max, found))
        found += [
            (start + int(time * step), start + row, start + column)
            for time in range(times)
            for row in range(rows)
            for column in range(columns)
        ]
    while len(found) < num_tokens:
        found.append((1 + max(map(max, found)),) * 3)
    return torch.tensor(found).T[:, None]


def prompt_of(
    family: PictureFamily, kinds: str, num_frames: int = 4, num_before: int = 3, *, seconds: float = 0.8,
    has_positions: bool = False,
) -> VideoPrompt:  # fmt: skip
    """A prompt with text around items: `p` a picture, `v` and `w` videos."""
    tokens = [(7 * place + 3) % 50 for place in range(num_before)]
    items, values, layouts = [], {"p": [], "v": []}, {"p": [], "v": []}  # type: ignore[var-annotated]
    for kind in kinds:
        if kind == "p":
            made = prepare(family.ours(), family.sizes[0], 5)
        else:
            made = prepare_video(family.ours_of_videos(), (60, 56), num_frames, seconds, ord(kind))
        first = len(tokens) + made.tokens.index(made.tokens[-1] if kind == "p" else 95)
        items.append(replace(made.item, offset=len(tokens) if kind == "p" else first))
        tokens += [*made.tokens, 11 + ord(kind) % 30, 7]
        own = "p" if kind == "p" else "v"
        values[own].append(made.values)
        layouts[own].append(made.item.layout)
    inputs: dict[str, Any] = family.inputs(values["p"], layouts["p"]) if values["p"] else {}
    if values["v"]:
        inputs["pixel_values_videos"] = torch.cat([one.flatten(1) for one in values["v"]])
        inputs["video_grid_thw"] = torch.tensor([layout[:3] for layout in layouts["v"]])
    if values["v"] and "2_5" in family.class_name:
        inputs["second_per_grid_ts"] = torch.tensor([2 * seconds / num_frames] * len(values["v"]))
    return VideoPrompt(tokens, tuple(items), inputs, family, has_positions)


@dataclass(frozen=True)
class Case:
    family: PictureFamily
    folder: Path
    reference: Any


@pytest.fixture(scope="module", params=EACH)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return Case(family, folder, family.write(folder))


@pytest.fixture(scope="module")
def runner(case: Case) -> ModelRunner:
    return load_runner(case.folder)


@pytest.mark.parametrize("is_hub", [True, pytest.param(False, marks=pytest.mark.full)], ids=["hub", "transformers-5"])
def test_logits_are_those_of_transformers(case: Case, is_hub: bool, tmp_path: Path) -> None:
    folder = case.folder
    if not is_hub:
        folder = tmp_path
        case.family.write(folder, is_hub=False)
    assert find_problems(ModelRunnerConfig(str(folder), max_model_len=512)) == []
    model = load_model(folder)
    for prompt in (prompt_of(case.family, "v"), prompt_of(case.family, "pvw")):
        outputs, logits = expected(case.reference, prompt, 4)
        for size in (1000, 23, 7):
            found = logits_in_chunks(model, prompt.tokens + outputs[:-1], prompt.items, size)
            assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))


def test_text_goes_on_behind_the_last_time_of_a_video(case: Case, runner: ModelRunner) -> None:
    if case.family.class_name.startswith("Qwen3"):
        pytest.skip("each time of its videos is a range of its own")
    prompt = prompt_of(case.family, "vw", 7, seconds=0.5 * 7, has_positions=True)
    outputs = expected(case.reference, prompt)[0]
    assert outputs != expected(case.reference, replace(prompt, has_positions=False))[0]
    for chunk in (1000, 7):
        assert generate(runner, prompt, chunk) == outputs


def test_greedy_tokens_are_those_of_transformers_however_a_prompt_is_cut(case: Case, runner: ModelRunner) -> None:
    prompts = [prompt_of(case.family, kinds, before) for kinds, before in (("v", 4), ("wv", 3), ("vpw", 4), ("vw", 1))]
    outputs = [expected(case.reference, prompt)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        for chunk in (1000, 23, 7):
            assert generate(runner, prompt, chunk) == tokens
    assert generate(runner, prompts[1], part=1) == outputs[1]


def test_requests_together_share_and_lose_and_find_what_was_computed(case: Case, runner: ModelRunner) -> None:
    first, swapped, alone = (prompt_of(case.family, kinds) for kinds in ("vw", "wv", "v"))
    media_id_of = {item.digest: number for number, item in enumerate(first.items, 1)}
    prompts = [first, swapped, alone, first]
    outputs = [expected(case.reference, prompt)[0] for prompt in prompts]
    driver = StepDriver(runner, NUM_BLOCKS)
    encode(driver, runner, [*enumerate(first.items, 1)])
    for index, prompt in enumerate(prompts):
        media = tuple((media_id_of[item.digest], item) for item in prompt.items)
        driver.add(f"r{index}", prompt.tokens, GREEDY, media=media)
    driver.step({f"r{index}": driver.num_left(f"r{index}") for index in range(3)})
    driver.share("r3", "r0")
    driver.step({f"r{index}": driver.num_left(f"r{index}") for index in range(4)})
    driver.preempt("r1")
    while min(map(len, driver.outputs.values())) < NUM_OUTPUTS:
        driver.step({f"r{index}": driver.num_left(f"r{index}") for index in range(4)})
    assert not driver.errors
    assert [driver.outputs[f"r{index}"][:NUM_OUTPUTS] for index in range(4)] == outputs
    for index in range(4):
        driver.remove(f"r{index}")
    driver.step({}, freed_media=[1, 2])


def test_an_item_that_is_none_is_refused(case: Case, runner: ModelRunner) -> None:
    encoder = runner._model.media_encoder()  # type: ignore[union-attr]
    assert encoder is not None
    item = prompt_of(case.family, "v").items[0]
    assert item.memory is not None
    for broken in (
        replace(item, layout=(0, *item.layout[1:])), replace(item, layout=item.layout[:2]), replace(item, kind="image"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="bytes are not a"):
            encoder.begin(broken, bytearray(item.memory.data))
        assert encoder.positions(broken) is None
    slow = replace(item, layout=(*item.layout[:3], struct.unpack("<I", struct.pack("<f", 1e3))[0]))
    assert encoder.positions(slow) is None or item.layout[0] == len(item.embed_runs)
