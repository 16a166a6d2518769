"""A process that is killed while it writes: the next one starts, and finds what was written or nothing.

`FAULTS_SCALE=1`, as in `make faults`, kills 200 of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from engine_core_helpers.killed_writers import check_all, kill_writer

NUM_KILLS = max(3, round(200 * float(os.environ.get("FAULTS_SCALE", "0"))))
MAX_WRITING_S = 0.1


@pytest.mark.timeout(60 + 2 * NUM_KILLS)
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path):
    folder, pick, num_read = tmp_path / "cache", random.Random(1), 0
    for number in range(NUM_KILLS):
        kill_writer(folder, number, pick.random() * MAX_WRITING_S)
        num_read += check_all(folder)
    assert num_read > 0
