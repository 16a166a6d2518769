"""Folders in the user's cache that stand for a model in another form.

They have small files, which are made once, and links to the files of the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmstack_gguf.header import GGUFError

MAX_FOLDERS = 32
_MARK = "config.json"


def cache_of(kind: str) -> Path:
    """The folder of such folders: `llmstack/KIND` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmstack" / kind


def made_folder(kind: str, identity: str, contents: Callable[[], Mapping[str, Any]], links: Mapping[str, Path]) -> Path:
    """The folder of this identity, made unless it is in the cache; the folders that were used last are kept.

    `contents`: Returns the small files by name, as bytes or as an object for JSON; `config.json` is among them. It is
    called only for a folder that is not there.
    `links`: Name to the file of the model.

    Raises:
        GGUFError: Others may write to the cache.
        OSError: The cache cannot be written.
    """

    def fill(made: Path) -> None:
        for name, content in contents().items():
            text = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
            (made / name).write_bytes(text)
        for name, file in links.items():
            (made / name).symlink_to(file)

    return filled_folder(kind, hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(), _MARK, fill)


def filled_folder(kind: str, name: str, mark: str, fill: Callable[[Path], None]) -> Path:
    """The folder of this name, filled unless it is in the cache; the folders that were used last are kept.

    `mark`: A file that every filled folder has.
    `fill`: Writes the files into a new folder, which only its owner may read. It is called only for a folder that is
    not there.

    Raises:
        GGUFError: Others may write to the cache.
        OSError: The cache cannot be written.
    """
    cache = _own_cache(kind)
    folder = cache / name
    if (folder / mark).is_file():
        os.utime(folder)
        return folder
    made = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    try:
        fill(made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not (folder / mark).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_oldest(cache)
    return folder


def is_made_folder(folder: Path, kind: str) -> bool:
    """Whether `made_folder` made this folder. Links are followed in such folders alone."""
    return Path(os.path.realpath(folder)).parent == Path(os.path.realpath(cache_of(kind)))


def file_identity(file: Path) -> str:
    """An identity that changes when a file does: its place, size, time and number."""
    status = file.stat()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"


def _own_cache(kind: str) -> Path:
    """The cache, which only its owner may write: a tokenizer decides what a prompt means."""
    cache = cache_of(kind)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise GGUFError(f"the cache {cache} belongs to another user, or others may write to it.")
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
