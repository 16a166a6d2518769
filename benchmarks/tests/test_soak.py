"""The soak finds what is left behind, and finds nothing else."""

from __future__ import annotations

import json
import random

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
    assert soak.main(["steps", "--count", "900", "--seed", "3"]) == 1
    assert "soak: after" in capsys.readouterr().err


def test_the_rise_is_that_of_most_samples_after_the_warm_up() -> None:
    samples = [(float(second), 100 + second / 3600) for second in range(0, 3600, 20)]
    expected = (samples[-1][0] - samples[int(180 * soak.WARM_UP_SHARE)][0]) / 3600
    assert soak.rise_mib(samples) == pytest.approx(expected)
    samples[100] = (samples[100][0], 900.0)
    assert soak.rise_mib(samples) == pytest.approx(expected, abs=0.05)
    assert soak.rise_mib(samples[:2]) == pytest.approx(0.0, abs=0.01)


@pytest.mark.full
def test_ten_seconds_of_a_server_end_with_its_figures() -> None:
    result = soak.soak_server(10 / 60, 2, is_judged=False)
    assert result["answers"]["200"] > 0
    assert result["answers"]["left"] + result["answers"]["200"] == sum(result["answers"].values())
    assert len(result["rise_mib"]) >= 2


def test_every_kind_of_request_is_drawn() -> None:
    draw, adapters, fields = random.Random(1), set(), set()
    for _ in range(200):
        path, body = soak.draw_body(draw, "base")
        assert path in ("/v1/completions", "/v1/chat/completions")
        adapters.add(body["model"])
        fields.update(body)
    assert adapters == {"base", *soak.ADAPTERS}
    assert {"n", "logprobs", "structured_outputs", "tools", "tool_choice", "response_format"} <= fields
