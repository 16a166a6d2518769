"""The number of functions on a request's way, as `tools/trace_request.py` counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The most that a path may have, as functions and calls: what it has, and a margin for what differs between passes. A
# chat has 590 to 613 calls, as its tokens come.
LIMITS = {"api": (243, 620), "engine-core": (119, 150), "engine-core-eager": (165, 410)}
MAX_STATIONS = 88


def trace(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "trace_request.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return dict(json.loads(trace("--json", "--walk")))


@pytest.mark.parametrize("path", LIMITS)
def test_a_path_stays_within_its_limits(figures: dict[str, Any], path: str) -> None:
    max_functions, max_calls = LIMITS[path]
    assert 0 < figures[path]["functions"] <= max_functions
    assert figures[path]["functions"] <= figures[path]["calls"] <= max_calls


def test_stations_are_fewer_than_the_files_of_a_way(figures: dict[str, Any]) -> None:
    for path in LIMITS:
        assert 0 < figures[path]["stations"] < figures[path]["files"]
    assert figures["api"]["stations"] + figures["engine-core"]["stations"] <= MAX_STATIONS


def test_the_walk_has_every_function_once_below_its_caller(figures: dict[str, Any]) -> None:
    walk = figures["engine-core"]["walk"]
    assert len(walk) == figures["engine-core"]["functions"]
    names = [line.strip() for line in walk]
    assert len(set(names)) == len(names)
    depths = [(len(line) - len(line.lstrip())) // 2 for line in walk]
    assert depths[0] == 0
    schedule = next(index for index, name in enumerate(names) if name.startswith("Scheduler.schedule "))
    assert 0 < depths[schedule] < depths[schedule + 1]


@pytest.mark.parametrize(
    "stage",
    ["telemetry", "structured", "parsers", "logprobs", "tools.py", "json_pieces.py", "queue_wait.py",
     "AuthenticationMiddleware", "StructureCheck", "ChatStream.read", "deltas.py", "sleep_level",
     "anthropic/routes", "Server._watch_engine", "_check_process", "_on_timer", "_send_comment", "set_deadline"],
)  # fmt: skip
def test_a_plain_chat_enters_no_stage_that_it_does_not_need(figures: dict[str, Any], stage: str) -> None:
    walk = figures["api"]["walk"]
    assert any(line.strip().startswith("ChatCompletion.events ") for line in walk)
    assert not [line for line in walk if stage in line]


def test_a_replayed_step_does_without_the_layers_of_the_model(figures: dict[str, Any]) -> None:
    replayed, eager = (figures[path]["walk"] for path in ("engine-core", "engine-core-eager"))
    assert not any("model-runner: models/" in line for line in replayed)
    assert any("model-runner: models/" in line for line in eager)
