"""A prefix cache on disk with damaged files and killed engine cores: the same texts, and no refused start."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCALE = float(os.environ.get("FAULTS_SCALE", "0.1"))
NUM_KILLS = max(3, round(20 * SCALE))
PROMPTS = [f"Once upon a time there were {number} boats on the sea. " * 12 for number in range(4)]


def texts(server: Any) -> list[str]:
    found = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 200, answer
        found.append(answer["choices"][0]["text"])
    return found


def regular_files(folder: Path) -> list[Path]:
    """The files of the cache that are neither a folder nor a link to something without an end."""
    return sorted(path for path in folder.glob("?" * 64 + "*") if path.is_file() and not path.is_symlink())


def damage(path: Path, pick: random.Random) -> None:
    """Does to a file what a disk, a person or another program may do."""
    content = path.read_bytes()
    what = pick.randrange(6)
    if what == 0:
        place = pick.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif what == 1:
        path.write_bytes(content[: pick.randrange(len(content))])
    elif what == 2:
        path.unlink()
    elif what == 3:
        path.unlink()
        path.mkdir()
    elif what == 4:
        path.unlink()
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(pick.choice(regular_files(path.parent)).read_bytes())


@pytest.mark.timeout(120 + 30 * NUM_KILLS)
def test_damaged_files_and_killed_engine_cores_change_no_text(
    launch: Callable[..., Any], stories_path: Path, tmp_path: Path
) -> None:
    folder, pick = tmp_path / "cache", random.Random(1)
    line = (str(stories_path), "--served-model-name", "stories", "--kv-cache-dir", str(folder))
    server = launch(*line, "--max-engine-restarts", str(NUM_KILLS + 1))
    server.wait_until_ready()
    expected = texts(server)
    for _ in range(NUM_KILLS):
        files = regular_files(folder)
        for path in pick.sample(files, min(len(files), 3)):
            damage(path, pick)
        [pid] = server.engine_pids()
        os.kill(pid, signal.SIGKILL)
        server.wait_for(lambda known=pid: server.engine_pids() not in ([], [known]), "another engine core")
        assert texts(server) == expected
    assert server.stop() == 0
    shutil.rmtree(tmp_path / "cache")
    Path(f"{folder}.secret").unlink()
    server = launch(*line)  # both may be removed
    server.wait_until_ready()
    assert texts(server) == expected
    assert server.stop() == 0
