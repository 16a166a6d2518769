"""Reading the header of a file with a tokenizer of 32,000 tokens, as a ratio to the format's own library."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmstack_gguf import read_header

NUM_TOKENS = 32_000


def write_file(path: Path, gguf: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{index}" for index in range(NUM_TOKENS)])
    writer.add_token_scores([-float(index) for index in range(NUM_TOKENS)])
    writer.add_token_types([1] * NUM_TOKENS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def median_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def bench_read_header(benchmark: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
    path = write_file(tmp_path / "model.gguf", gguf)
    benchmark(lambda: read_header(path))
    own, theirs = median_s(lambda: read_header(path)), median_s(lambda: gguf.GGUFReader(path))
    benchmark.extra_info["times_the_library"] = round(own / theirs, 3)
