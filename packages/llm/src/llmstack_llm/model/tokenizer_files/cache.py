"""Converted tokenizers in the user's cache, filled by a child process."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from llmstack_llm.model.tokenizer_files.source import (
    CONFIG_FILES,
    MAX_FILE_BYTES,
    TEMPLATE_FILES,
    ConversionError,
    Format,
    find_source,
    mistral_source,
    read_model,
    read_source,
)
from llmstack_llm.model.tokenizer_files.tekken_template import template_version
from llmstack_model_files import artifact_path

logger = logging.getLogger(__name__)

KIND = "tokenizers"
_FORMAT = "4"
"""Is part of a folder's name, and changes when the conversion does."""

_CHILD = "llmstack_llm.model.tokenizer_files.child"
_REFUSED = 3
_TIMEOUT_S = 180
_MAX_REASON_CHARS = 300
_TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATES = 64


def converted_folder(folder: Path, mode: str = "auto") -> Path:
    """The folder to read a tokenizer from: `folder` itself, or one with its converted tokenizer.

    `mode`: `mistral` converts tekken.json whatever is beside it, with the chat template of mistral-common for it.

    Raises:
        ConversionError: The tokenizer cannot be converted, or others may write to the cache.
    """
    is_mistral = mode == "mistral"
    source = mistral_source(folder) if is_mistral else find_source(folder)
    if source is None:
        return folder
    file_format, name = source
    if is_mistral and template_version() is None:
        raise ConversionError("--tokenizer-mode mistral needs mistral-common: pip install 'llmstack-llm[mistral]'")
    copied = [] if is_mistral else list(_copied_files(folder))
    try:
        return _cached(folder, file_format, name, copied)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise ConversionError(f"{folder.name}: the tokenizer cannot be converted: {reason}") from error


def _cached(folder: Path, file_format: Format, name: str, copied: list[str]) -> Path:
    contents = {each: read_source(folder, each) for each in (name, *copied)}
    version = template_version() if file_format is Format.TEKKEN else None
    parts = (_FORMAT, file_format, version, *(read_model(folder) if file_format is Format.TIKTOKEN else ()), "")
    identity = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16)
    for each, content in contents.items():
        identity.update(f"{each}\0{len(content)}\0".encode())
        identity.update(content)

    def fill(made: Path) -> None:
        for each in copied:
            (made / each).parent.mkdir(mode=0o700, exist_ok=True)
            (made / each).write_bytes(contents[each])
        _convert(folder, made, file_format, name)
        logger.info("converted %s of %s to a tokenizer.json (%s)", name, folder.name, identity.hexdigest())

    from llmstack_gguf import GGUFError, filled_folder  # late: most tokenizers are read as they are

    try:
        return filled_folder(KIND, identity.hexdigest(), "tokenizer.json", fill)
    except GGUFError as error:
        raise ConversionError(str(error)) from None


def _copied_files(folder: Path) -> Iterator[str]:
    """Files beside the tokenizer that say how it is used."""
    names = [*CONFIG_FILES, *TEMPLATE_FILES]
    found = (path.name for path in sorted((folder / _TEMPLATES).glob("*.jinja"))[:_MAX_TEMPLATES])
    for name in (*names, *(f"{_TEMPLATES}/{each}" for each in found)):
        if artifact_path(folder, name) is not None:
            yield name


def _convert(folder: Path, output: Path, file_format: Format, name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", _CHILD, str(folder), str(output), str(file_format), name]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConversionError(f"{folder.name}: the conversion of {name} takes more than {_TIMEOUT_S} s") from error
    if done.returncode == _REFUSED:
        reason = done.stdout.decode("utf-8", "replace").strip()[:_MAX_REASON_CHARS]
        raise ConversionError(f"{folder.name}: {reason}")
    if done.returncode:
        logger.debug("conversion: %s", done.stderr[-4096:].decode("utf-8", "replace"))
        raise ConversionError(f"{folder.name}: the conversion of {name} has failed (status {done.returncode})")
    if (output / "tokenizer.json").stat().st_size > 4 * MAX_FILE_BYTES:
        raise ConversionError(f"{folder.name}: {name} converts to a tokenizer.json that is too large")
