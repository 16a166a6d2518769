"""The training scripts draw what they say, know a right answer, and train what transformers computes equally."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

TRAIN = Path(__file__).parents[1] / "train"
pytest.importorskip("tokenizers")
pytest.importorskip("PIL")


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if not TRAIN.is_dir():
        pytest.skip("the training scripts are not part of this installation")
    monkeypatch.syspath_prepend(str(TRAIN))


def scenes(count: int) -> Iterator[tuple[Any, random.Random]]:
    from drawing_training.scenes import random_scene

    for number in range(count):
        draw = random.Random(f"test:{number}")
        yield random_scene(draw), draw


def test_things_lie_in_the_picture_and_apart() -> None:
    import math

    for scene, _ in scenes(200):
        assert len(scene.things) == sum(count for _, _, count in scene.groups)
        for index, thing in enumerate(scene.things):
            assert all(thing.radius < side < 1 - thing.radius for side in (thing.x, thing.y))
            for other in scene.things[:index]:
                assert math.dist((thing.x, thing.y), (other.x, other.y)) > thing.radius + other.radius


def test_a_drawing_has_the_colours_of_its_things_and_the_same_seed_draws_it_again() -> None:
    from drawing_training.drawing import draw_scene
    from drawing_training.scenes import COLOURS

    for scene, draw in scenes(30):
        state = draw.getstate()
        image = draw_scene(scene, draw)
        draw.setstate(state)
        assert draw_scene(scene, draw).tobytes() == image.tobytes()
        found = [colour for _, colour in image.getcolors(image.width * image.height)]
        for colour in {thing.colour for thing in scene.things}:
            wanted = COLOURS[colour]
            assert any(all(abs(a - b) <= 18 for a, b in zip(one, wanted, strict=True)) for one in found)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("A red circle and two blue squares.", True),
        ("two blue squares and a red circle", True),
        ("A red circle and two blue squares and a red circle.", False),
        ("A red circle and three blue squares.", False),
        ("A red circle.", False),
        ("Two red circles and a blue square.", False),
        ("A red circle and two blue square.", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_names_every_group_and_nothing_else(answer: str, is_right: bool) -> None:
    from drawing_training import questions
    from drawing_training.scenes import Scene

    scene = Scene((), (("red", "circle", 1), ("blue", "square", 2)))
    things = type("Things", (), {"things": (1, 2, 3), "is_symbol": False, "groups": scene.groups})
    assert questions.is_right(answer, things()) is is_right


def test_every_answer_of_the_script_is_right_and_of_another_scene_wrong() -> None:
    from drawing_training.questions import describe, is_right

    drawn = [scene for scene, _ in scenes(150)]
    for scene, other in pairwise(drawn):
        assert is_right(describe(scene), scene)
        assert is_right(describe(other), scene) == (sorted(other.groups) == sorted(scene.groups) or (
            scene.is_symbol and other.is_symbol and scene.things[0].kind == other.things[0].kind
        ))  # fmt: skip


def test_a_row_learns_answers_alone_and_has_a_place_for_each_vector() -> None:
    pytest.importorskip("torch")
    from drawing_training.batches import IGNORED, Batches
    from drawing_training.network import ModelConfig
    from drawing_training.tokens import END, IMAGE_ID, train_tokenizer

    config, tokenizer = ModelConfig(), train_tokenizer(0)
    batch = Batches(tokenizer, config, 0, 12).batch(0)
    assert batch.values.shape[1:] == (3, config.image_size, config.image_size)
    assert int((batch.token_ids == IMAGE_ID).sum()) == len(batch.values) * config.num_vectors
    assert batch.kinds.shape == batch.colours.shape == (len(batch.values), config.side**2)
    assert bool(((batch.kinds > 0) == (batch.colours > 0)).all())
    for ids, targets in zip(batch.token_ids.tolist(), batch.targets.tolist(), strict=True):
        learned = [number for number, target in enumerate(targets) if target != IGNORED]
        assert all(targets[number] == ids[number + 1] for number in learned)
        text = tokenizer.decode([targets[number] for number in learned], skip_special_tokens=False)
        assert text.endswith(END)
        assert "<|user|>" not in text
        assert "?" not in text


def test_a_run_resumes_where_it_was_stopped_and_transformers_agrees_with_the_export(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from drawing_training.batches import Batches
    from drawing_training.export import export_model
    from drawing_training.loop import Trained, TrainingConfig, train
    from drawing_training.network import ModelConfig, Seer
    from drawing_training.tokens import train_tokenizer

    sizes = ModelConfig(
        vision_width=32, vision_inner=40, num_vision_layers=2, width=24, inner=40, num_layers=2, num_heads=2
    )
    config = TrainingConfig(num_steps=4, num_decay_steps=2, num_warmup_steps=1, num_rows=3, log_every=1, save_every=2)
    tokenizer = train_tokenizer(0)

    class Stopped(Batches):
        def batch(self, number: int) -> Any:
            if number == 3:
                raise KeyboardInterrupt
            return super().batch(number)

    def run(folder: Path, batches_class: type[Batches] = Batches, seed: int = 0) -> Any:
        folder.mkdir(exist_ok=True)
        torch.manual_seed(seed)
        model = Trained(Seer(sizes))
        assert train(model, batches_class(tokenizer, sizes, 7, config.num_rows), config, folder).step == 4
        return model

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Stopped)
    resumed = run(tmp_path / "parts", seed=1)  # its weights are those of the checkpoint
    states = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in states)

    export_model(whole.seer, tokenizer, tmp_path / "model", torch.float32)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    batch = Batches(tokenizer, sizes, 1, 4).batch(0)
    rows = [row for row in range(4) if 5 in batch.token_ids[row]]
    with torch.no_grad():
        ours = whole.seer.head(whole.seer(batch.token_ids[rows], whole.seer.see(batch.values)))
        theirs = model(input_ids=batch.token_ids[rows], pixel_values=batch.values[:, None]).logits
    assert float((ours - theirs).abs().max()) < 2e-5 * float(theirs.abs().max())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is True
