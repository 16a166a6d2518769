"""Models in Mistral's own form.

That is `params.json`, and `consolidated*.safetensors` with names of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llmstack_model_files.folder import ModelFilesError, artifact_path, read_json
from llmstack_model_files.mistral_params import config_of_params

PARAMS_NAME = "params.json"
CONSOLIDATED = "consolidated"
"""Files that begin so name their tensors in Mistral's way."""
_KIND = "mistral"
_FORMAT = "1"
"""Is part of a folder's name, and changes when the conversion does."""
_COPIED = (".json", ".jinja", ".model", ".txt")
_MAX_COPIED_BYTES = 64 << 20
_MAX_ALL_COPIED_BYTES = 256 << 20
"""They are in memory together before they are written; those of published models have 40 MB."""


class FileForm(NamedTuple):
    """The form that is read of a repository in two forms, the hub's and Mistral's: `auto` or `mistral`.

    Attributes:
        config: Of the configuration; `auto` prefers `config.json`.
        weights: Of the weights; `auto` prefers those that are not consolidated.
        tokenizer: Of the tokenizer; `auto` prefers one without conversion. The reader of the tokenizer applies it.
    """

    config: str = "auto"
    weights: str = "auto"
    tokenizer: str = "auto"


ANY_FORM = FileForm()


def in_form(folder: Path, form: FileForm, *, has_hub_weights: bool) -> Path:
    """The folder itself, or a made folder with links to the files of the wanted form.

    `has_hub_weights`: Whether it has weights under the hub's names, `model*.safetensors`.

    Raises:
        ModelFilesError: A file that is asked for is not there, or says something that is not supported.
    """
    from llmstack_gguf import GGUFError, file_identity, is_made_folder, made_folder  # late: most are in the usual form

    if is_made_folder(folder, _KIND):
        return folder
    own_config = form.config == "mistral" or (form.config == "auto" and not (folder / "config.json").is_file())
    has_consolidated = any(folder.glob(f"{CONSOLIDATED}*.safetensors"))
    own_weights = form.weights == "mistral" or (has_consolidated and not has_hub_weights)
    if own_config and artifact_path(folder, PARAMS_NAME) is None:
        raise ModelFilesError(f"{folder.name} has no {PARAMS_NAME}, which --config-format mistral reads.")
    if form.weights == "mistral" and not has_consolidated:
        raise ModelFilesError(f"{folder.name} has no {CONSOLIDATED}*.safetensors, which --load-format mistral reads.")
    if not own_config and not own_weights:
        return folder
    weights = {path.name: Path(os.path.realpath(path)) for path in _weight_files(folder, own_weights)}
    copied = [path for path in sorted(folder.iterdir()) if _is_copied(path, own_config)]
    if sum(path.stat().st_size for path in copied) > _MAX_ALL_COPIED_BYTES:
        limit = _MAX_ALL_COPIED_BYTES >> 20
        raise ModelFilesError(f"{folder.name}: the files beside the weights have over {limit} MiB.")

    def contents() -> dict[str, Any]:
        files: dict[str, Any] = {path.name: path.read_bytes() for path in copied}
        if own_config:
            files["config.json"] = config_of_params(read_json(folder, PARAMS_NAME))
        return files

    parts = [str(own_config), *(f"{path.name}\0{file_identity(path)}" for path in (*copied, *weights.values()))]
    try:
        return made_folder(_KIND, "\0".join([_FORMAT, *parts]), contents, weights)
    except GGUFError as error:
        raise ModelFilesError(str(error)) from error
    except OSError as error:
        raise ModelFilesError(f"{folder.name} cannot be opened: {error.strerror} ({error.filename}).") from error


def linked_weights(folder: Path) -> list[Path]:
    """The weight files that a folder of `in_form` stands for; none for any other folder."""
    return [Path(os.path.realpath(path)) for path in _links(folder)]


def has_own_names(folder: Path) -> bool:
    """Whether the tensors of a folder have the names that Mistral gives them."""
    return any(path.name.startswith(CONSOLIDATED) for path in _links(folder))


def _links(folder: Path) -> list[Path]:
    from llmstack_gguf import is_made_folder  # late, as above

    links = sorted(path for path in Path(folder).glob("*.safetensors") if path.is_symlink())
    return links if links and is_made_folder(folder, _KIND) else []


def _weight_files(folder: Path, own_weights: bool) -> Iterator[Path]:
    """Of two copies of consolidated weights, whole and in parts, the parts."""
    paths = sorted(folder.glob("*.safetensors"))
    found = [path for path in paths if path.name.startswith(CONSOLIDATED) == own_weights]
    parts = [path for path in found if "-of-" in path.name]
    for path in parts or found:
        if artifact_path(folder, path.name) is None:
            raise ModelFilesError(f"{path.name} is missing.")
        yield path


def _is_copied(path: Path, own_config: bool) -> bool:
    """Small files beside the weights; an index of weights is not needed, and a configuration may be replaced."""
    name = path.name
    is_text = path.suffix in _COPIED or ".model.v" in name
    is_replaced = own_config and name == "config.json"
    if not is_text or is_replaced or name.endswith(".index.json") or artifact_path(path.parent, name) is None:
        return False
    return path.stat().st_size <= _MAX_COPIED_BYTES
