"""A GGUF file is named by its path, by a folder that has nothing else, or by repository and quantization."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_writers import write_model

from llmstack_model_files import ModelFilesError, gguf_weights, is_local_name, resolve, resolve_model
from llmstack_model_files.gguf import choose_files, split_quantization

FILES = ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-F16-00001-of-00002.gguf", "model-F16-00002-of-00002.gguf",
         "mmproj-model-Q8_0.gguf", "README.md"]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_path_and_a_folder_with_one_file_lead_to_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    path = write_model(folder / "model.gguf")
    found = resolve_model(str(path))
    assert (found / "config.json").is_file()
    assert gguf_weights(found) == [path]
    assert resolve_model(str(folder)) == found
    assert gguf_weights(folder) == []
    assert is_local_name("model.gguf")

    write_model(folder / "other.gguf")
    with pytest.raises(ModelFilesError, match=r"has 2 GGUF files; name one, such as .*model\.gguf"):
        resolve_model(str(folder))
    path.unlink()
    with pytest.raises(ModelFilesError, match="is gone"):
        gguf_weights(found)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFilesError, match=r"There is no file .*absent\.gguf"):
        resolve_model(str(tmp_path / "absent.gguf"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(ModelFilesError, match=r"^damaged\.gguf is no GGUF file"):
        resolve_model(str(tmp_path / "damaged.gguf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "damaged.gguf"))  # no folder
    with pytest.raises(ModelFilesError, match=r"^model\.gguf cannot be opened: "):
        resolve_model(str(write_model(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name:Q4_K_M", ("org/name", "Q4_K_M")),
        ("org/name", ("org/name", "")),
        ("org/name:not/this", ("org/name:not/this", "")),
        ("C:", ("C:", "")),
    ],
)
def test_a_quantization_follows_a_colon(name: str, expected: tuple[str, str]) -> None:
    assert split_quantization(name) == expected


def test_the_file_of_a_quantization_is_chosen_or_the_files_are_named() -> None:
    assert choose_files(FILES, "Q8_0", "org/name") == ["model-Q8_0.gguf"]
    assert choose_files(FILES, "q4_k_m", "org/name") == ["model-Q4_K_M.gguf"]
    assert choose_files(FILES, "F16", "org/name") == [FILES[2], FILES[3]]
    for files in (FILES[:3], [*FILES, "other-F16.gguf"]):
        with pytest.raises(ModelFilesError, match=r"org/name has F16 in \d files, which are not all parts of one"):
            choose_files(files, "F16", "org/name")
    with pytest.raises(ModelFilesError, match=r"no GGUF file of Q4; its GGUF files: model-F16"):
        choose_files(FILES, "Q4", "org/name")


def test_a_quantization_is_found_in_the_hubs_cache_and_else_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import huggingface_hub.constants

    path = write_model(tmp_path / "model-Q8_0.gguf")
    monkeypatch.setattr(resolve, "_find_cached", lambda repository, revision: tmp_path)
    found = resolve_model("org/name:Q8_0")
    assert gguf_weights(found) == [path]

    asked: list[Any] = []
    siblings = [SimpleNamespace(rfilename=name) for name in FILES]
    info = SimpleNamespace(sha="abc", siblings=siblings)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *args, **options: info)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *args, **options: asked.append((args, options)) or str(path)
    )
    assert resolve_model("org/name:Q4_K_M", "main") == found
    assert asked == [(("org/name", "model-Q4_K_M.gguf"), {"revision": "main"})]
    with pytest.raises(ModelFilesError, match="no GGUF file of Q2_K"):
        resolve_model("org/name:Q2_K")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFilesError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/name:Q2_K")
