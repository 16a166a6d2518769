"""Default and maximum size of the KV cache on a CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack_model_runner.memory import sizing
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import write_gpt2_config
from llmstack_types import ModelRunnerConfig


@pytest.mark.parametrize(("available", "expected"), [(None, 4 << 30), (100 << 30, 4 << 30), (1000, 400), (0, 0)])
def test_a_cpu_gives_forty_percent_up_to_four_gib(available: int | None, expected: int) -> None:
    assert sizing.host_kv_bytes(available) == expected


@pytest.mark.parametrize(("available", "expected"), [(None, sys.maxsize), (100 << 30, (100 << 30) - 7), (5, 0)])
def test_a_size_that_was_asked_for_may_take_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch, available: int | None, expected: int
) -> None:
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: available)
    assert sizing.obtainable_host_kv_bytes(7) == expected


def test_what_packing_has_freed_goes_back_to_the_system_unless_the_model_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(sizing, "return_freed_memory", devices.append)
    config = ModelRunnerConfig(str(write_gpt2_config(tmp_path)), load_format="dummy", max_model_len=64, device="cpu")
    ModelRunner(config).load_model()
    assert devices == []
    monkeypatch.setattr(sizing, "MIN_TRIMMED_BYTES", 1)
    ModelRunner(config).load_model()
    assert devices == [torch.device("cpu")]
    sizing.settle_heap(torch.device("meta"), 1)
    assert len(devices) == 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_memory_that_steps_free_is_not_touched_for_the_first_time_again() -> None:
    """In a process of its own, since the C library's settings are the process's."""
    code = """
import resource, torch
from llmstack_model_runner.memory import sizing
sizing.settle_heap(torch.device("cpu"), 0)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(1 << 21)  # 8 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 100  # 16,384 if each were returned
