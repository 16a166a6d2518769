"""Processes that are killed while they write prefixes to disk, and what the next one finds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from engine_core_helpers.endless_writer import MAX_BYTES, REQUEST, blocks_of, open_store, texts, write_endlessly


def kill_writer(folder: Path, seed: int, writing_s: float) -> None:
    """Forks a process that writes, and kills it after so many seconds."""
    begun, signal_begun = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            write_endlessly(folder, seed, lambda: os.write(signal_begun, b"."))
        finally:
            os._exit(1)
    os.close(signal_begun)
    try:
        assert os.read(begun, 1), "the writer could not open the folder"
        time.sleep(writing_s)
    finally:
        os.close(begun)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def check_all(folder: Path) -> int:
    """Reads all that is found, which has to be right; how many files that were."""
    store, num_read = open_store(folder), 0
    for text in texts():
        chain = store.chain(REQUEST, text)
        for extent in store.extents(0, store.find(chain, chain.num_blocks)):
            assert store.read(chain, extent) == blocks_of(chain, extent)
            num_read += 1
    assert store.files.num_bytes <= MAX_BYTES
    assert {path.name for path in folder.iterdir() if len(path.name) not in (64, 80)} == {"lock"}
    store.files.close()
    return num_read
