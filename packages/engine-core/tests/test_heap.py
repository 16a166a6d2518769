"""Threads of the engine core's process share one heap."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# What threads have allocated and dropped, with a heap for each or for all.
COUNT_HEAPS = """
import ctypes, sys, threading
from llmstack_engine_core.heap import share_one_heap

if sys.argv[1] == "one":
    share_one_heap()
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
def test_threads_allocate_from_one_heap() -> None:
    def num_heaps(kind: str) -> int:
        command = [sys.executable, "-c", COUNT_HEAPS, kind]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("<heap nr=")

    assert num_heaps("one") == 1
    assert num_heaps("each") > 1
