"""A process that is killed while it writes: the next one starts, and finds what was written or nothing.

`FAULTS_SCALE=1`, as in `make faults`, kills 200 of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_core_helpers import endless_writer
from engine_core_helpers.endless_writer import MAX_BYTES, REQUEST, blocks_of, open_store, texts

NUM_KILLS = max(3, round(200 * float(os.environ.get("FAULTS_SCALE", "0"))))
MAX_WRITING_S = 0.1


@pytest.mark.timeout(60 + 2 * NUM_KILLS)
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path):
    folder, pick, num_read = tmp_path / "cache", random.Random(1), 0
    for number in range(NUM_KILLS):
        command = [sys.executable, endless_writer.__file__, str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            time.sleep(pick.random() * MAX_WRITING_S)
            writer.kill()
        num_read += check_all(folder)
    assert num_read > 0


def check_all(folder: Path) -> int:
    """Reads all that is found; how many files that were."""
    store, num_read = open_store(folder), 0
    for text in texts():
        chain = store.chain(REQUEST, text)
        for extent in store.extents(0, store.find(chain, chain.num_blocks)):
            assert store.read(chain, extent) == blocks_of(chain, extent)
            num_read += 1
    assert store.files.num_bytes <= MAX_BYTES
    assert {path.name for path in folder.iterdir() if len(path.name) != 64} == {"lock"}
    store.files.close()
    return num_read
