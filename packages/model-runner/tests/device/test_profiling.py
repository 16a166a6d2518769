"""Profiles by PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from llmstack_model_runner.device.profiling import Profiling

CPU = torch.device("cpu")


def test_a_profile_names_the_operations_between_its_start_and_its_stop(tmp_path: Path):
    profiling, path = Profiling(), tmp_path / "x.json.gz"
    torch.ones(2).cumsum(0)
    profiling.start(CPU, with_stack=False, with_memory=False, record_shapes=True)
    torch.ones(2, 3) @ torch.ones(3, 4)
    profiling.stop(str(path))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert [event["args"]["Input Dims"][:2] for event in products] == [[[2, 3], [3, 4]]]
    assert all(event.get("name") != "aten::cumsum" for event in events)
    profiling.stop(str(tmp_path / "none"))  # there is none
    assert not (tmp_path / "none").exists()


def test_a_trace_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path):
    profiling = Profiling()
    profiling.start(CPU, with_stack=False, with_memory=False, record_shapes=False)
    with pytest.raises((OSError, RuntimeError)):
        profiling.stop(str(tmp_path / "missing" / "x.json"))
