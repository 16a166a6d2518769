"""The soak finds what is left behind, and finds nothing else."""

from __future__ import annotations

import json

import pytest
import soak

from llmstack_kv_cache import KVCacheManager


def test_thousands_of_steps_leave_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "STEPS_PER_ROUND", 400)
    monkeypatch.setattr(soak, "MAX_NEW_OBJECTS", 5000)  # the ring of events is not full yet
    assert soak.main(["steps", "--count", "1200", "--seed", "3"]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert totals["steps"] >= 1200
    assert min(totals["requests"], totals["aborts"], totals["preemptions"]) > 10


def test_a_block_that_is_kept_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "STEPS_PER_ROUND", 300)
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request_id: None)
    assert soak.main(["steps", "--count", "900"]) == 1
    assert "soak: after" in capsys.readouterr().err


def test_the_slope_is_that_of_most_samples() -> None:
    samples = [(float(second), 100 + second / 3600) for second in range(0, 3600, 20)]
    assert soak.slope_per_hour(samples) == pytest.approx(1.0)
    samples[100] = (samples[100][0], 900.0)
    assert soak.slope_per_hour(samples) == pytest.approx(1.0, abs=0.05)


@pytest.mark.full
def test_ten_seconds_of_a_server_end_with_its_figures() -> None:
    result = soak.soak_server(10 / 60, 2, is_judged=False)
    assert result["answers"]["200"] > 0
    assert len(result["mib_per_hour"]) >= 2
