"""Threads of an engine core share one heap, and those of a front end a few."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# What threads have allocated and dropped, with a heap for each or for all.
COUNT_HEAPS = """
import ctypes, os, sys, threading
from llmstack_engine_core.heap import share_heaps, share_one_heap

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
{"one": share_one_heap, "few": share_heaps, "each": lambda: None}[sys.argv[1]]()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
everyone_has_begun = threading.Barrier(4)
def work():
    everyone_has_begun.wait()
    library.malloc(1 << 12)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
library.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap for each thread")
def test_threads_share_heaps() -> None:
    def num_heaps(kind: str) -> int:
        command = [sys.executable, "-c", COUNT_HEAPS, kind]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("<heap nr=")

    assert num_heaps("one") == 1
    assert num_heaps("few") == 2  # of one processor
    assert num_heaps("each") > 2
