"""Opens files of a model folder, and nothing outside it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, overload

from llmstack_model_files.config_defaults import with_defaults
from llmstack_model_files.older_configs import named, renewed
from llmstack_model_files.text_config import TEXT_PART_OF, text_config_of

MAX_JSON_BYTES = 64 << 20
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# Descriptions that older tools write beside config.json: the file, what it has in any case, and its method.
_OLDER_DESCRIPTIONS = (("quantize_config.json", "bits", "gptq"), ("quant_config.json", "w_bit", "awq"))
_MODELOPT_NAME = "hf_quant_config.json"
GIT_LFS_START = b"version https://git-lfs"
# transformers writes such a number as an object with this key.
_FLOAT_KEY = "__float__"
_INFINITIES = {"Infinity": float("inf"), "-Infinity": float("-inf")}
# Formats whose reading can run code.
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5"})


class ModelFilesError(Exception):
    """A model cannot be found, or a file of it is missing, damaged or not allowed; the text is one line for a user."""


def artifact_path(folder: Path, name: str) -> Path | None:
    """Real path of the file `name` in `folder`; None where there is none.

    Symbolic links may lead elsewhere in the folder and, in a folder of the hub's cache, to the repository's `blobs`.

    Raises:
        ModelFilesError: The name leads out of the folder, is no plain file, or has a format that can carry code.
    """
    shown = name[:64]
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ModelFilesError(f"{shown!r} is not a name of a file inside a model folder.")
    if PurePosixPath(name).suffix.lower() in PICKLE_SUFFIXES:
        raise ModelFilesError(f"{shown} is not opened: files of its format can run code; only safetensors are read.")
    root = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(root.joinpath(*parts)))
    if not any(path.is_relative_to(allowed) for allowed in _allowed_roots(root)):
        raise ModelFilesError(f"{shown} is a link that leads out of the model folder.")
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelFilesError(f"{shown} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(mode):
        raise ModelFilesError(f"{shown} is not a plain file.")
    return path


def _allowed_roots(root: Path) -> list[Path]:
    """The folder itself; for `<repository>/snapshots/<revision>`, also `<repository>/blobs`, where its links lead."""
    if root.parent.name == "snapshots":
        return [root, root.parent.parent / "blobs"]
    return [root]


def open_artifact(folder: Path, name: str) -> BinaryIO:
    """Open a file of a model folder for reading bytes; the caller closes it.

    Raises:
        ModelFilesError: As `artifact_path`, there is no such file, or it is a pointer of Git LFS.
    """
    path = artifact_path(folder, name)
    if path is None:
        raise ModelFilesError(f"{Path(folder).name or folder} has no {name[:64]}.")
    with contextlib.ExitStack() as closed_on_error:
        try:
            file = closed_on_error.enter_context(path.open("rb"))
            check_no_pointer(file.peek(len(GIT_LFS_START)), name)
        except OSError as error:
            raise ModelFilesError(f"{name[:64]} cannot be read: {error.strerror}.") from error
        closed_on_error.pop_all()
    return file


@overload
def read_json(folder: Path, name: str, required: Literal[True] = True) -> dict[str, Any]: ...
@overload
def read_json(folder: Path, name: str, required: bool) -> dict[str, Any] | None: ...
def read_json(folder: Path, name: str, required: bool = True) -> dict[str, Any] | None:
    """The JSON object in a file of a model folder; None where the file is absent and not required.

    Raises:
        ModelFilesError: Over 64 MiB, not JSON, or not an object.
    """
    if not required and artifact_path(folder, name) is None:
        return None
    return parse_json_object(_read_text(folder, name), name)


def read_model_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of a model folder with the values of `overrides`, and the defaults of what it leaves out.

    Of a model with parts for images or sound it is the configuration of the text model: see `text_config_of`.

    Wherever a checkpoint describes its quantization, it is `quantization_config` of the whole here. Some have it in
    `text_config`, and older ones of ModelOpt, AutoGPTQ and AutoAWQ in a file of its own.

    Raises:
        ModelFilesError: As `read_json`.
    """
    try:
        stored = renewed(read_json(folder, "config.json"))
    except ValueError as error:
        raise ModelFilesError(str(error)) from None
    config = named(overridden(stored, overrides))
    if not any(config.get(field) for field in _QUANTIZATION_FIELDS):
        text_config = config.get("text_config")
        nested = text_config.get("quantization_config") if isinstance(text_config, Mapping) else None
        if (found := nested or _separate_quantization(folder)) is not None:
            config["quantization_config"] = found
    found = text_config_of(config)
    if TEXT_PART_OF in found:  # its fields are deeper in the file, and overrides name them as those of any model
        own = {name: value for name, value in overrides.items() if name not in stored}
        found = overridden(found, own)
    return with_defaults(found)


def _separate_quantization(folder: Path) -> dict[str, Any] | None:
    """The description of a quantization in a file of its own; None where there is none."""
    found = (read_json(folder, _MODELOPT_NAME, required=False) or {}).get("quantization")
    if isinstance(found, Mapping) and found.get("quant_algo"):
        return {"quant_method": "modelopt", **found}
    for name, field, method in _OLDER_DESCRIPTIONS:
        older = read_json(folder, name, required=False) or {}
        if older.get(field):
            return {"quant_method": method, **older}
    return None


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the values of `overrides`; where both have an object, the objects are merged.

    The older names of a rotary embedding also replace what `rope_parameters` of a newer file says.
    """
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        older = {key: overrides[key] for key in ("rope_theta", "partial_rotary_factor") if key in overrides}
        scaling = overrides.get("rope_scaling") or {}
        if isinstance(scaling, Mapping) and "type" in scaling:
            scaling = {"rope_type": scaling["type"], **scaling}
        if isinstance(scaling, Mapping) and (older or scaling):
            overrides = {**overrides, "rope_parameters": {**older, **scaling}}
    return _merged(config, overrides)


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged


def read_json_array(folder: Path, name: str, required: bool = True) -> list[Any] | None:
    """The JSON array in a file of a model folder; None where the file is absent and not required.

    Raises:
        ModelFilesError: Over 64 MiB, not JSON, or not an array.
    """
    if not required and artifact_path(folder, name) is None:
        return None
    value = _parse_json(_read_text(folder, name), name)
    if not isinstance(value, list):
        raise ModelFilesError(f"{name[:64]} does not hold a JSON array.")
    return value


def _read_text(folder: Path, name: str) -> bytes:
    with open_artifact(folder, name) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ModelFilesError(f"{name[:64]} is larger than {MAX_JSON_BYTES >> 20} MiB.")
    return text


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `text`, without doubled keys or NaN; infinity is a number; `name` is for the message."""
    value = _parse_json(text, name)
    if not isinstance(value, dict):
        raise ModelFilesError(f"{name[:64]} does not hold a JSON object.")
    return value


def _parse_json(text: bytes, name: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_constant)
    except RecursionError as error:
        raise ModelFilesError(f"{name[:64]} is nested too deeply.") from error
    except ValueError as error:  # bad UTF-8, bad JSON, integers of thousands of digits
        raise ModelFilesError(f"{name[:64]} is not valid JSON.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("doubled key")
    is_float = found.keys() == {_FLOAT_KEY} and isinstance(found[_FLOAT_KEY], str)
    return _INFINITIES.get(found[_FLOAT_KEY], found) if is_float else found


def check_no_pointer(content: bytes, name: str) -> None:
    """Raises ModelFilesError if a file is what Git LFS leaves in place of the file itself."""
    if content.startswith(GIT_LFS_START):
        raise ModelFilesError(f"{name[:64]} is a pointer of Git LFS and not the file itself; run git lfs pull.")


def _constant(name: str) -> float:
    if name in _INFINITIES:
        return _INFINITIES[name]
    raise ValueError(name)
