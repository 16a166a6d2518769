"""The thread that writes blocks, where one of them cannot be written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmstack_engine_core.disk_cache.block_files import BlockFiles
from llmstack_engine_core.disk_cache.scopes import Scope
from llmstack_engine_core.disk_cache.write_behind import Pace, Sealable, WriteBehind

NAMES = [letter * 64 for letter in "ab"]


def test_a_folder_in_the_place_of_one_block_keeps_no_other_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scope = Scope.of(b"s" * 32, b"facts", "tenant")
    (tmp_path / (NAMES[0] + scope.owner)).mkdir()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    files = BlockFiles(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), lock, 1 << 20)
    behind = WriteBehind(files, Pace(time.monotonic), time.monotonic)
    for name in NAMES:
        behind.add(Sealable(scope, name, bytearray(b"text")))
    behind.close(10.0)
    assert [name in files for name in NAMES] == [False, True]
    assert (behind.num_dropped, behind.num_written_bytes) == (1, files.num_bytes)
    (said,) = caplog.messages
    assert said.startswith("the KV cache on disk: blocks could not be written, and the next ones are tried: ")
    assert "Is a directory" in said
    files.close()
