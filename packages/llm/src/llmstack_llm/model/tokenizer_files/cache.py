"""Converted tokenizers in the user's cache, filled by a child process."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmstack_llm.model.tokenizer_files.source import (
    CONFIG_FILES,
    MAX_FILE_BYTES,
    ConversionError,
    Format,
    find_source,
    read_model,
    read_source,
)
from llmstack_model_files import artifact_path

logger = logging.getLogger(__name__)

MAX_FOLDERS = 32
_FORMAT = "3"
"""Is part of a folder's name, and changes when the conversion does."""

_CHILD = "llmstack_llm.model.tokenizer_files.child"
_REFUSED = 3
_TIMEOUT_S = 180
_MAX_REASON_CHARS = 300
_TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATES = 64


def cache_folder() -> Path:
    """The folder of converted tokenizers: `llmstack/tokenizers` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmstack" / "tokenizers"


def converted_folder(folder: Path) -> Path:
    """The folder to read a tokenizer from: `folder` itself, or one with its converted tokenizer.

    Raises:
        ConversionError: The tokenizer cannot be converted, or others may write to the cache.
    """
    source = find_source(folder)
    if source is None:
        return folder
    file_format, name = source
    copied = list(_copied_files(folder))
    try:
        return _cached(folder, file_format, name, copied)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise ConversionError(f"{folder.name}: the tokenizer cannot be converted: {reason}") from error


def _cached(folder: Path, file_format: Format, name: str, copied: list[str]) -> Path:
    contents = {each: read_source(folder, each) for each in (name, *copied)}
    parts = (_FORMAT, file_format, *(read_model(folder) if file_format is Format.TIKTOKEN else ()), "")
    identity = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16)
    for each, content in contents.items():
        identity.update(f"{each}\0{len(content)}\0".encode())
        identity.update(content)
    cache = _own_cache()
    target = cache / identity.hexdigest()
    if (target / "tokenizer.json").is_file():
        os.utime(target)
        return target
    made = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    try:
        for each in copied:
            (made / each).parent.mkdir(mode=0o700, exist_ok=True)
            (made / each).write_bytes(contents[each])
        _convert(folder, made, file_format, name)
        logger.info("converted %s of %s to a tokenizer.json (%s)", name, folder.name, target)
        try:
            made.rename(target)
        except OSError:  # another process was first
            if not (target / "tokenizer.json").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_oldest(cache)
    return target


def _copied_files(folder: Path) -> Iterator[str]:
    """Files beside the tokenizer that say how it is used."""
    names = [*CONFIG_FILES, "chat_template.jinja", "chat_template.json"]
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


def _own_cache() -> Path:
    """The cache, which only its owner may write: a tokenizer decides what a prompt means."""
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConversionError(f"the cache {cache} belongs to another user, or others may write to it")
    return cache


def _remove_oldest(cache: Path) -> None:
    """Keeps the folders that were used last."""
    folders = sorted(_made_folders(cache), key=lambda entry: entry[0], reverse=True)
    for _, folder in folders[MAX_FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _made_folders(cache: Path) -> Iterator[tuple[int, Path]]:
    for folder in cache.iterdir():
        try:
            if not folder.name.startswith("."):
                yield folder.stat().st_mtime_ns, folder
        except FileNotFoundError:  # removed by another process meanwhile
            continue
