"""Default and maximum size of the KV cache on a CPU."""

from __future__ import annotations

import sys

import pytest

from llmstack_model_runner.memory import sizing


@pytest.mark.parametrize(("available", "expected"), [(None, 4 << 30), (100 << 30, 4 << 30), (1000, 400), (0, 0)])
def test_a_cpu_gives_forty_percent_up_to_four_gib(available: int | None, expected: int) -> None:
    assert sizing.host_kv_bytes(available) == expected


@pytest.mark.parametrize(("available", "expected"), [(None, sys.maxsize), (100 << 30, (100 << 30) - 7), (5, 0)])
def test_a_size_that_was_asked_for_may_take_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch, available: int | None, expected: int
) -> None:
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: available)
    assert sizing.obtainable_host_kv_bytes(7) == expected
