"""Files below one folder, opened without following a link."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from llmstack_media.errors import fetch_failed, url_not_allowed
from llmstack_media.fetch.data_urls import check_length
from llmstack_media.fetch.policy import split

_MAX_DEPTH = 64


def read_local(
    url: str, folder: Path | None, max_bytes: int, reserve: Callable[[int], None] = lambda num_bytes: None
) -> bytes:
    """The content of a `file:` URL. `reserve` is called with its length before it is read.

    Raises:
        InvalidRequestError: It is not below the folder, no regular file, or too large. All of them have one message,
            so that a refusal says nothing of other files. Also what `reserve` raises.
    """
    return _read(functools.partial(_open_below, *names_below(url, folder)), max_bytes, reserve)


def read_file(path: str, max_bytes: int, reserve: Callable[[int], None]) -> bytes:
    """The content of a file that the caller may read; raises as `read_local`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    return _read(lambda: _regular(os.open(path, flags)), max_bytes, reserve)


def _read(open_file: Callable[[], int], max_bytes: int, reserve: Callable[[int], None]) -> bytes:
    try:
        descriptor = open_file()
    except OSError as error:
        raise fetch_failed("The file cannot be read: it does not exist, is a link, or is no regular file") from error
    with os.fdopen(descriptor, "rb") as file:
        length = os.fstat(descriptor).st_size
        check_length(length, max_bytes)
        reserve(length)
        data = file.read(length + 1)
    if len(data) > length:
        raise fetch_failed("The file cannot be read: it is being written")
    return data


def names_below(url: str, folder: Path | None) -> tuple[str, list[str]]:
    """The folder, and the names from there to the file. Nothing is opened.

    Raises:
        InvalidRequestError: The URL names nothing below the folder, or there is none.
    """
    if folder is None:
        raise url_not_allowed("is not read: this server reads no local files")
    parts = split(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or "\0" in path:
        raise url_not_allowed("must have the form file:///path")
    root = os.path.abspath(folder)
    names = path.removeprefix(root).split("/") if path.startswith(root.rstrip("/") + "/") else []
    names = [name for name in names if name not in ("", ".")]
    if not names or ".." in names or len(names) > _MAX_DEPTH:
        raise url_not_allowed("is not below the folder of allowed local media")
    return root, names


def _open_below(root: str, names: list[str]) -> int:
    """A descriptor of a regular file, reached by one folder after the other."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(names[-1], flags | os.O_NONBLOCK, dir_fd=folder)  # a pipe would wait for its writer
    finally:
        os.close(folder)
    return _regular(descriptor)


def _regular(descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("no regular file")
    return descriptor
