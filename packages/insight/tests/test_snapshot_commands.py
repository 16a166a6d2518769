"""Snapshots of a step log, in explanations and replays by command."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from step_log_helpers.logged_runs import ended_requests, write_long_log

from llmstack_core_scheduler import SchedulerConfig
from llmstack_insight import steps_of_log
from llmstack_insight.commands import replay
from llmstack_insight.commands.explain import ExplainCommand
from llmstack_insight.commands.replay import ReplayCommand
from llmstack_step_log import read_step_log
from llmstack_step_log.control_plane import CacheConfig
from llmstack_step_log.records import RequestAdded, StepScheduled
from llmstack_step_log.seek import LogFile, RunPart

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, fair_quantum=16, max_loras=1)
CACHE = CacheConfig(24, block_size=4)


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.steps"
    write_long_log(path, replace(LIMITS, policy="fair"), CACHE)
    return path


@pytest.fixture(autouse=True)
def few_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_of_log, "STEPS_BEFORE", 16)


def explained(path: Path, request_id: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    parser, command = argparse.ArgumentParser(), ExplainCommand()
    command.add_arguments(parser)
    code = command.run(parser.parse_args([request_id, "--log", str(path), "--json"]))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_an_explanation_from_a_snapshot_is_the_one_from_the_beginning(
    long_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Estimates apart: a snapshot has more of the tokens from before the first step that is kept."""
    names = ended_requests(long_log)[40::80]
    assert len(names) > 1
    for name in names:
        found = explained(long_log, name, capsys)["facts"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogFile, "_find_snapshots", lambda file: [])
            expected = explained(long_log, name, capsys)["facts"]
        for facts in (found, expected):
            facts.pop("replayed", None)
            facts.pop("no_estimate", None)
        assert found == expected


def read_positions(path: Path, request_id: str) -> tuple[int, RunPart]:
    """Where the request came, and the part that explains it."""
    part = LogFile(path).part_with([request_id], 16)
    assert part is not None
    return path.read_bytes().index(request_id.encode()), part


def test_an_explanation_begins_with_the_snapshot_before_the_request(long_log: Path) -> None:
    name = ended_requests(long_log)[-1]
    _, part = read_positions(long_log, name)
    assert part.start is not None
    before = list(part.events())
    came = next(i for i, one in enumerate(before) if isinstance(one, RequestAdded) and one.request.request_id == name)
    num_steps = sum(isinstance(one, StepScheduled) for one in before[:came])
    assert 16 <= num_steps < 32 + 1
    assert part.start.place.num_steps > 500


def test_a_damaged_snapshot_is_left_out_for_the_one_before(
    long_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ended_requests(long_log)[-1]
    _, part = read_positions(long_log, name)
    assert part.start is not None
    num_steps = part.start.place.num_steps
    data, path = bytearray(long_log.read_bytes()), tmp_path / "damaged.steps"
    found = next(one for one in LogFile(long_log)._found if one.place.num_steps == num_steps)
    data[found.record_at + 200] ^= 1
    path.write_bytes(data)
    _, other = read_positions(path, name)
    assert other.start is not None
    assert other.start.place.num_steps == num_steps - 16
    sentence = f"The snapshot at step {num_steps} is damaged: an earlier one is used."
    assert sentence in explained(path, name, capsys)["sentences"]


def test_a_log_without_any_whole_snapshot_is_explained_from_its_beginning(
    long_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ended_requests(long_log)[20]
    data, path = bytearray(long_log.read_bytes()), tmp_path / "damaged.steps"
    for found in LogFile(long_log)._found:
        data[found.record_at + 200] ^= 1
    path.write_bytes(data)
    _, part = read_positions(path, name)
    assert part.start is None
    assert part.notes != []
    assert explained(path, name, capsys)["facts"] == explained(long_log, name, capsys)["facts"]


def test_what_is_damaged_before_a_snapshot_does_no_harm_after_it(
    long_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ended_requests(long_log)[-1]
    data, path = bytearray(long_log.read_bytes()), tmp_path / "damaged.steps"
    expected = explained(long_log, name, capsys)
    data[LogFile(long_log).start + 2000] ^= 1
    path.write_bytes(data)
    assert explained(path, name, capsys)["facts"] == expected["facts"]


def replayed(path: Path, *arguments: object) -> int:
    parser, command = argparse.ArgumentParser(), ReplayCommand()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(path), *map(str, arguments)]))


def test_what_follows_a_snapshot_is_proved_without_the_rest(
    long_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = read_step_log(long_log).last.digest.hex()
    assert replayed(long_log, "--from-step", 980) == 0
    assert f": every decision is as recorded, hash {digest}\n" in capsys.readouterr().out
    assert replayed(long_log, "--from-step", 15) == 0
    assert f"{long_log}: steps 0 to 1000, " in capsys.readouterr().out
    data, path = bytearray(long_log.read_bytes()), tmp_path / "damaged.steps"
    found = LogFile(long_log)._found
    data[found[30].record_at + 200] ^= 1
    path.write_bytes(data)
    assert replayed(path, "--from-step", 496) == 0
    captured = capsys.readouterr()
    assert captured.err == "llmstack replay: The snapshot at step 496 is damaged: an earlier one is used.\n"
    assert f"{path}: steps 480 to 1000, " in captured.out
    path.write_bytes(data[: found[35].record_at - 20])
    assert replayed(path, "--from-step", 500) == 1
    assert "is truncated or damaged after byte" in capsys.readouterr().err


def test_a_page_of_the_last_steps_begins_with_a_snapshot(
    long_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "MAX_PAGE_STEPS", 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogFile, "_find_snapshots", lambda file: [])
        assert replayed(long_log, "--page", tmp_path / "whole.html") == 0
    assert replayed(long_log, "--page", tmp_path / "part.html") == 0
    assert capsys.readouterr().out.count(": 30 steps are drawn in ") == 2
    assert (tmp_path / "part.html").read_text() == (tmp_path / "whole.html").read_text()
