"""A model's name becomes a folder: the folder itself, the hub's cache, a download, or one line that says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_writers import install_models

from llmstack_model_files import ModelFilesError, resolve, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAFETENSORS = (2).to_bytes(8, "little") + b"{}"


def make_cache(home: Path, name: str, *, with_weights: bool = True) -> Path:
    """A repository as huggingface-hub stores it: blobs, and a snapshot of links to them."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    files = {"config.json": json.dumps({"model_type": "gpt2"}).encode()}
    if with_weights:
        files["model.safetensors"] = SAFETENSORS
    for number, (file_name, data) in enumerate(files.items()):
        (repository / "blobs" / f"blob{number}").write_bytes(data)
        (snapshot / file_name).symlink_to(f"../../blobs/blob{number}")
    return snapshot


def resolve_in_child(name: str, home: Path, **environment: str) -> str:
    """Resolve in a fresh process, since huggingface-hub reads its environment at import; its output is returned."""
    code = (
        "import sys\n"
        "from llmstack_model_files import ModelFilesError, resolve_model\n"
        "try:\n"
        "    print(resolve_model(sys.argv[1]))\n"
        "except ModelFilesError as error:\n"
        "    print('ERROR', error)\n"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    variables |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_folder_with_a_configuration_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_an_installed_package_provides_a_model_folder_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "their_model_folders.py").write_text(f"def path():\n    return {str(tmp_path / 'model')!r}\n")
    install_models(tmp_path, theirs="their_model_folders:path")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("theirs") == tmp_path / "model"
    here = tmp_path / "here/theirs"
    here.mkdir(parents=True)
    (here / "config.json").write_text("{}")
    monkeypatch.chdir(here.parent)
    assert resolve_model("theirs") == Path("theirs")  # a folder of that name comes first


def test_an_installed_model_that_cannot_be_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty_model_folders.py").write_text(
        f"def path():\n    return {str(tmp_path)!r}\n\ndef fail():\n    raise OSError('the disk is gone')\n"
    )
    install_models(
        tmp_path, empty="empty_model_folders:path", failing="empty_model_folders:fail", absent="nowhere:path"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve_model("empty")
    with pytest.raises(ModelFilesError, match=r"^The installed model failing .*: OSError: the disk is gone$"):
        resolve_model("failing")
    with pytest.raises(ModelFilesError, match=r"^The installed model absent .* cannot be opened: ModuleNot"):
        resolve_model("absent")


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nowhere", "a/b/c", "~/nowhere-at-all", "~nobody-of-that-name", "/" + "x" * 5000]
)
def test_a_path_that_is_not_there_is_no_repository_id(name: str) -> None:
    with pytest.raises(ModelFilesError, match="no folder"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["gpt 2", "org/na?me", "-gpt", "org/", "ä", "x" * 97, "x" * 5000])
def test_a_name_that_cannot_be_a_repository_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelFilesError, match="neither a folder nor a repository id"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://hub.example/org/name", "did you mean org/name?"),
        ("http://hub.example/org/name/tree/main", "did you mean org/name?"),
        ("hf://org/name", "did you mean org/name?"),
        ("s3://bucket/name", "download its files."),
        ("https://", "download its files."),
    ],
)
def test_an_address_is_no_model(address: str, advice: str) -> None:
    with pytest.raises(ModelFilesError) as caught:
        resolve_model(address)
    assert str(caught.value) == f"{address!r} is an address, and a model is a folder or a repository id; {advice}"


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(ModelFilesError, match=r"did you mean gpt2\?"):
        resolve_model("gpt-2")


def test_a_cached_repository_is_found_offline_and_its_files_open(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path, "org/tiny")
    assert resolve_in_child("org/tiny", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


def test_a_cached_repository_without_weights_serves_where_the_hub_is_out_of_reach(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path, "org/tiny", with_weights=False)
    assert resolve_in_child("org/tiny", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


def test_offline_without_a_copy_is_said_with_the_variable(tmp_path: Path) -> None:
    answer = resolve_in_child("org/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("ERROR org/tiny is not in the cache, and HF_HUB_OFFLINE is set")
    assert "\n" not in answer


def test_a_hub_that_cannot_be_reached_is_said_quickly(tmp_path: Path) -> None:
    answer = resolve_in_child("org/tiny", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "hub cannot be reached" in answer
    assert "HF_HUB_OFFLINE" in answer
    assert "\n" not in answer


def answered(kind: str, status: int | None) -> Exception:
    """An error of huggingface-hub as it comes from an answer with `status`."""
    from huggingface_hub import errors

    error_class = getattr(errors, kind)
    error = error_class.__new__(error_class)
    error.response = None if status is None else SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("RepositoryNotFoundError", 404, "no model org/x on the hub.*HTTP 404.*HF_TOKEN"),
        ("RepositoryNotFoundError", 401, "private.*HTTP 401.*set HF_TOKEN"),
        ("GatedRepoError", 403, "gated: accept its terms.*HF_TOKEN"),
        ("RevisionNotFoundError", 404, "no revision v9"),
        ("HfHubHTTPError", 500, "refused org/x .HTTP 500"),
        ("LocalEntryNotFoundError", None, "cannot be reached"),
    ],
)
def test_answers_of_the_hub_are_distinguished(
    kind: str, status: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    message = resolve._why_not("org/x", "v9", answered(kind, status))
    assert "\n" not in message
    with pytest.raises(ModelFilesError, match=words):
        raise ModelFilesError(message)


def test_importing_the_package_does_not_import_the_hub() -> None:
    code = "import sys, llmstack_model_files; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_file_that_is_no_model_is_said_to_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# Read me", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "./README.md", str(tmp_path / "README.md")):
        with pytest.raises(
            ModelFilesError, match=r"README\.md is a file, and neither a model's folder nor a GGUF file\.$"
        ):
            resolve_model(name)
