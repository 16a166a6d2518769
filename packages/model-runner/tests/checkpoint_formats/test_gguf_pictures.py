"""A text model and an encoder in two GGUF files compute what the same weights of a repository do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.backend_picture_families import BACKEND_FAMILIES
from model_runner_helpers.mmproj_files import PROJECTORS, write_two_files
from model_runner_helpers.picture_families import FAMILIES
from model_runner_helpers.picture_prompts import generate, load_model, load_runner, prompt_of, vectors_of

from llmstack_gguf import GGUFError, model_folder, picture_folder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EACH = [name if name == "qwen 2 vl" else pytest.param(name, marks=pytest.mark.full) for name in PROJECTORS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", EACH)
def test_two_files_compute_what_a_repository_does(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES[name]
    family.write(tmp_path / "hub")
    text, pictures = write_two_files(tmp_path / "hub", family)
    folder = picture_folder(model_folder(text), pictures)
    assert picture_folder(folder, pictures) == folder
    model, expected = load_model(folder), load_model(tmp_path / "hub")
    assert "unexpected" not in caplog.text
    prompt = prompt_of(family, (0, 1))
    for item in prompt.items:
        assert torch.equal(vectors_of(model, item), vectors_of(expected, item))
    found = generate(load_runner(folder), prompt, 23)
    assert found == generate(load_runner(tmp_path / "hub"), prompt, 23)


def test_an_encoder_of_eight_bits_is_widened(tmp_path: Path) -> None:
    family = FAMILIES["qwen 2 vl"]
    family.write(tmp_path / "hub")
    text, pictures = write_two_files(tmp_path / "hub", family, "Q8_0")
    model, exact = load_model(picture_folder(model_folder(text), pictures)), load_model(tmp_path / "hub")
    for item in prompt_of(family, (0, 1)).items:
        found, expected = vectors_of(model, item), vectors_of(exact, item)
        assert not torch.equal(found, expected)
        assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


@pytest.mark.full
def test_pixtral_without_a_merger_has_the_encoder_of_transformers(tmp_path: Path) -> None:
    family = BACKEND_FAMILIES["llava with pixtral"]
    family.write(tmp_path / "hub")
    text, pictures = write_two_files(tmp_path / "hub", family)
    model = load_model(picture_folder(model_folder(text), pictures))
    expected = load_model(tmp_path / "hub")
    for item in prompt_of(family, (0, 1)).items:
        assert torch.equal(vectors_of(model, item), vectors_of(expected, item))


def test_an_encoder_of_another_model_is_refused(tmp_path: Path) -> None:
    for name in ("llava", "qwen 2 vl"):
        FAMILIES[name].write(tmp_path / name)
    text, pictures = write_two_files(tmp_path / "llava", FAMILIES["llava"])
    _, others = write_two_files(tmp_path / "qwen 2 vl", FAMILIES["qwen 2 vl"])
    folder = model_folder(text)
    with pytest.raises(GGUFError, match=r"mmproj.gguf is not supported beside this text model: it belongs to a text"):
        picture_folder(folder, others)
    with pytest.raises(GGUFError, match=r"mmproj.gguf is the encoder of this model, and mmproj.gguf another one"):
        picture_folder(picture_folder(folder, pictures), others)
