"""Reads the files of a LoRA adapter, as a whole and within a limit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from llmstack_model_files.folder import (
    PICKLE_SUFFIXES,
    ModelFilesError,
    artifact_path,
    open_artifact,
    parse_json_object,
)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_DIGEST_LENGTH = 32


class AdapterFiles(NamedTuple):
    """The bytes of both files, and a digest of them."""

    config: bytes
    weights: bytes
    digest: str


def read_adapter(folder: Path, max_bytes: int) -> AdapterFiles:
    """Reads an adapter's folder into memory, so that a later change of the files has no effect.

    Raises:
        ModelFilesError: A file is missing, too large, or of a format that can carry code.
    """
    _check_folder(folder)
    config = _read(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    weights = _read(folder, WEIGHTS_NAME, max_bytes)
    digest = _begin_digest(config)
    digest.update(weights)
    return AdapterFiles(config, weights, digest.hexdigest()[:_DIGEST_LENGTH])


def adapter_digest(folder: Path, max_bytes: int) -> str:
    """The digest that `read_adapter` returns, without the memory that it takes.

    Raises:
        ModelFilesError: As `read_adapter`.
    """
    _check_folder(folder)
    config = _read(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    digest, num_bytes = _begin_digest(config), 0
    with open_artifact(folder, WEIGHTS_NAME) as file:
        # A sparse file of gigabytes costs nothing to make, and seconds to read.
        _check_size(WEIGHTS_NAME, os.fstat(file.fileno()).st_size, max_bytes)
        while piece := file.read(_PIECE_BYTES):
            num_bytes += len(piece)
            _check_size(WEIGHTS_NAME, num_bytes, max_bytes)
            digest.update(piece)
    return digest.hexdigest()[:_DIGEST_LENGTH]


def check_adapter_folder(folder: Path) -> None:
    """Refuses what is no folder of an adapter, without reading its weights.

    Raises:
        ModelFilesError: A file is missing, or of a format that can carry code; the configuration is no JSON object.
    """
    _check_folder(folder)
    parse_json_object(_read(folder, CONFIG_NAME, MAX_CONFIG_BYTES), CONFIG_NAME)


def _check_folder(folder: Path) -> None:
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name of thousands of characters
        is_folder = False
    if not is_folder:
        raise ModelFilesError(f"{folder.name[:64] or 'the path'} is no folder of an adapter.")
    if artifact_path(folder, WEIGHTS_NAME) is None:
        raise ModelFilesError(_why_none(folder))


def _begin_digest(config: bytes) -> hashlib._Hash:
    return hashlib.sha256(len(config).to_bytes(8, "little") + config)


def _check_size(name: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ModelFilesError(f"{name} has more than {max_bytes} bytes.")


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    with open_artifact(folder, name) as file:
        _check_size(name, os.fstat(file.fileno()).st_size, max_bytes)
        content = file.read(max_bytes + 1)
    _check_size(name, len(content), max_bytes)
    return content


def _why_none(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.glob("adapter_model.*") if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{pickles[0][:64]} is not opened: files of its format can run code; "
            f"save the adapter as safetensors ({WEIGHTS_NAME})."
        )
    return f"{folder.name[:64]} has no {WEIGHTS_NAME}."
