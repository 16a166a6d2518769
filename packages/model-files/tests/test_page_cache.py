"""Files are read once into the page cache, within a limit, and what is there already is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmstack_model_files import read_ahead

PIECE = 1 << 16
MODULE = "llmstack_model_files.page_cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and size of each read."""
    made: list[tuple[int, int]] = []
    plain = os.sendfile

    def noting(sink: int, source: int, start: int, count: int) -> int:
        num_read = plain(sink, source, start, count)
        made.append((start, num_read))
        return num_read

    monkeypatch.setattr(os, "sendfile", noting)
    monkeypatch.setattr(f"{MODULE}.PIECE_BYTES", PIECE)
    return made


def written(path: Path, num_bytes: int) -> Path:
    path.write_bytes(bytes(num_bytes))
    return path


def read(paths: list[Path], max_bytes: int) -> None:
    for thread in read_ahead(paths, max_bytes):
        thread.join()


def covered(reads: list[tuple[int, int]]) -> list[int]:
    return sorted(byte for start, size in reads for byte in range(start, start + size))


def test_each_byte_is_read_once(tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._is_cached", lambda descriptor, start: False)
    read([written(tmp_path / "a", 5 * PIECE + 3)], 1 << 30)
    assert covered(reads) == [*range(5 * PIECE + 3)]


def test_no_more_than_the_limit_is_read(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}._is_cached", lambda descriptor, start: False)
    files = [written(tmp_path / name, 2 * PIECE) for name in ("a", "b", "c")]
    read(files, 3 * PIECE + 7)
    assert sum(size for _, size in reads) == 3 * PIECE + 7
    assert read_ahead(files, 0) == []


def test_a_file_that_is_not_there_does_not_keep_the_others_from_being_read(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}._is_cached", lambda descriptor, start: False)
    read([tmp_path / "missing", written(tmp_path / "a", PIECE)], 1 << 30)
    assert covered(reads) == [*range(PIECE)]


def test_what_is_in_the_page_cache_is_not_read(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    path = written(tmp_path / "a", 4 * PIECE)
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system does not tell what is cached")
    read([path], 1 << 30)
    assert reads == []
