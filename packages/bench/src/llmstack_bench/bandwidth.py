"""Memory read bandwidth of the machine: the limit of single-stream CPU decoding."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor

BUFFER_BYTES = 256 << 20
NUM_PASSES = 5


def read_bandwidth_gb_per_s(num_threads: int | None = None, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Bytes read per nanosecond by all threads together, the best of five passes over a buffer larger than any cache.

    The C library's `memchr` searches for an absent byte: it only reads, with the processor's widest instructions.
    ctypes releases the interpreter's lock meanwhile.

    `num_threads`: None uses every processor that this process may use.
    """
    threads = num_threads or len(os.sched_getaffinity(0))
    with mmap.mmap(-1, buffer_bytes) as buffer:
        # Pages that were never written all map to one page of zeros, which would stay in the cache.
        for start in range(0, buffer_bytes, mmap.PAGESIZE):
            buffer[start] = 1
        view = (ctypes.c_char * buffer_bytes).from_buffer(buffer)
        try:
            return _best_pass(ctypes.addressof(view), buffer_bytes, threads)
        finally:
            del view  # the map cannot be closed while it is exported


def _best_pass(address: int, num_bytes: int, num_threads: int) -> float:
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    part = num_bytes // num_threads
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_PASSES):
            started_s = time.perf_counter()
            parts = [pool.submit(memchr, address + index * part, 2, part) for index in range(num_threads)]
            for found in parts:
                found.result()
            best_s = min(best_s, time.perf_counter() - started_s)
    return part * num_threads / best_s / 1e9
