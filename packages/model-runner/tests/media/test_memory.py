"""The bytes of an item: exactly as many as it says, from wherever they are, or an error of one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmstack_model_runner.media.memory import MediaUnreadableError, read_memory
from llmstack_types import MediaItem, MediaMemory
from llmstack_types.media import memory_name


def item(memory: MediaMemory | None) -> MediaItem:
    return MediaItem(bytes(32), "image", 0, 1, memory=memory)


def test_bytes_of_a_file_and_bytes_in_the_item_are_the_same(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9
    (tmp_path / "data").write_bytes(data)
    assert read_memory(item(MediaMemory(len(data), data=data))) == data
    assert read_memory(item(MediaMemory(len(data), path=str(tmp_path / "data")))) == data


def test_sealed_memory_of_a_process_is_read_by_its_descriptor() -> None:
    file = os.memfd_create(memory_name(bytes(32)))
    os.write(file, b"pixels")
    assert read_memory(item(MediaMemory(6, path=f"/proc/{os.getpid()}/fd/{file}"))) == b"pixels"
    os.close(file)
    with pytest.raises(MediaUnreadableError, match="cannot be opened"):
        read_memory(item(MediaMemory(6, path=f"/proc/{os.getpid()}/fd/{file}")))


def test_memory_of_another_item_under_the_same_number_is_refused() -> None:
    file = os.memfd_create(memory_name(bytes([1] * 32)))
    os.write(file, b"pixels")
    with pytest.raises(MediaUnreadableError, match="something else"):
        read_memory(item(MediaMemory(6, path=f"/proc/{os.getpid()}/fd/{file}")))
    os.close(file)


def test_what_is_not_there_or_has_another_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"1234")
    os.mkfifo(tmp_path / "pipe")
    for memory, words in (
        (None, "without its bytes"),
        (MediaMemory(3, data=b"1234"), "4 bytes and not 3"),
        (MediaMemory(5, path=str(tmp_path / "data")), "4 bytes and not 5"),
        (
            MediaMemory(1 << 60, path=str(tmp_path / "data")),
            "4 bytes and not 1152921504606846976",
        ),  # before there is memory for it
        (MediaMemory(4, path=str(tmp_path / "gone")), "cannot be opened"),
        (MediaMemory(4, path="bad\0name"), "cannot be opened"),
        (MediaMemory(0, path=str(tmp_path / "pipe")), "no file"),
        (MediaMemory(4, path=str(tmp_path)), "no file"),
    ):
        with pytest.raises(MediaUnreadableError, match=words):
            read_memory(item(memory))
