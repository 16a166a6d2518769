"""`llmstack explain`, from a log and from a server."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine_core_helpers.small_cores import add, added_during_a_step, logged_core, run
from step_log_helpers.logged_runs import LoggedRun

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_insight.commands.explain import ExplainCommand
from llmstack_insight.explain import explain
from llmstack_step_log import RecordedRun
from llmstack_step_log.control_plane import CacheConfig
from llmstack_step_log.decisions import DecisionHash
from llmstack_step_log.encoding import encode_header, put_checkpoint
from llmstack_step_log.packing import pack, unpack
from llmstack_step_log.records import Checkpoint
from llmstack_step_log.seek import LogFile
from llmstack_types import RequestNote, SchedulerOutput

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, max_loras=1)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    made = ExplainCommand()
    made.add_arguments(parser)
    return made.run(parser.parse_args(arguments))


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    add(core, "long", 90)
    core.step()
    add(core, "r-0", 8, first=99)
    run(core)
    core.shutdown()
    assert command("r", "--log", str(log), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    facts = found["facts"]
    assert (found["id"], facts["queue_cause"], facts["queued_behind"]) == ("r-0", "token budget", "long")
    assert command("r", "--log", str(log)) == 0
    assert "others used all 16 tokens of each step" in capsys.readouterr().out
    assert command("missing", "--log", str(log)) == 1
    assert "has no request 'missing'" in capsys.readouterr().err
    log.write_bytes(b"no log")
    assert command("r", "--log", str(log)) == 1
    assert "is no log of steps" in capsys.readouterr().err


def test_a_log_has_the_step_during_which_a_request_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    _, came_s = added_during_a_step(core, lambda step: step.start_s + 1e-5)
    waited_s = next(one.start_s for one in core.recent_steps(0).steps if one.stats.step == 2) - came_s
    core.shutdown()
    assert command("r", "--log", str(log), "--json") == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["queue_cause"], facts["queued_behind"]) == ("step", "long")
    assert facts["queue_ms"] == pytest.approx(1000 * waited_s, abs=0.2)


def test_what_another_engine_core_had_generated_is_no_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    add(core, "r", 8, max_tokens=9, output_token_ids=(5, 6, 7))
    add(core, "other", 8, first=99)
    run(core)
    decoded = RECENT_STEPS.unpack(unpack(pack(RECENT_STEPS.pack(core.recent_steps(0), "recording")), list), "recording")
    assert decoded.notes == {"r": RequestNote(num_resumed_tokens=3)}
    found = explain(decoded, "r")
    assert (found.facts["prompt_tokens"], found.facts["resumed_tokens"]) == (8, 3)
    text = " ".join(found.sentences)
    assert "Another engine core had generated 3 tokens of its answer before: what follows is of the time since." in text
    assert "The prefix cache held nothing of its prompt and these of 11 tokens. What it did not hold was" in text
    assert "resumed_tokens" not in explain(decoded, "other").facts
    core.shutdown()
    assert command("r", "--log", str(log), "--json") == 0
    assert json.loads(capsys.readouterr().out)["facts"]["resumed_tokens"] == 3


def test_a_log_explains_the_last_of_several_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    for index, max_tokens in enumerate((4, 9, 6)):
        add(core, f"{index}_r-0", 8, max_tokens, fork_of="0_r-0" if index else "")
    run(core)
    core.shutdown()
    assert command("r", "--log", str(log), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], sorted(found["facts"]["parts"])) == ("1_r-0", ["0_r-0", "1_r-0", "2_r-0"])
    assert found["sentences"][0].startswith("It was computed as 3 requests, ")


@pytest.mark.parametrize("name", ["cmpl-mine", "cmpl-mine-0123456789abcdef0123456789abcdef"])
def test_a_log_has_the_id_that_the_client_gave(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    add(core, "cmpl-mine-other-0", 8)
    add(core, "cmpl-mine-0123456789abcdef0123456789abcdef-0", 8)
    run(core)
    core.shutdown()
    assert command(name, "--log", str(log), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["id"] == "cmpl-mine-0123456789abcdef0123456789abcdef-0"
    assert command("cmpl-min", "--log", str(log)) == 1


def test_a_log_explains_a_beam_search_as_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = logged_core(log := tmp_path / "steps.log")
    add(core, "r/beam-1", 8, max_tokens=1)
    add(core, "other", 20, first=9)
    core.step()
    for number in range(2, 8):
        add(core, f"r/beam-{number}", 9 + number // 4, max_tokens=1)
        if number % 3 == 1:
            core.step()
    run(core)
    core.shutdown()
    assert command("r", "--log", str(log), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["facts"]["prompt_tokens"], found["facts"]["status"]) == (
        "r",
        8,
        "finished_length_capped",
    )
    assert found["facts"]["beams"] == 7
    assert found["facts"]["no_estimate"] == "a beam search is not replayed"
    assert abs(sum(found["facts"]["spans_ms"].values()) - found["facts"]["total_ms"]) < 1


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1"])
def test_a_server_that_is_not_there_is_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("r", "--url", url) == 1
    assert capsys.readouterr().err.count("\n") == 1


def recorded_log(path: Path) -> Path:
    core = logged_core(path)
    for number in range(8):
        add(core, f"r{number}", 8, max_tokens=40, first=number + 50)
        run(core)
    core.shutdown()
    return path


def test_a_damaged_log_is_used_up_to_its_last_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = recorded_log(tmp_path / "steps.log")
    data = bytearray(log.read_bytes())
    data[data.index(b"r5") + 10] ^= 1
    log.write_bytes(data)
    assert command("r4", "--log", str(log), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["facts"]["damaged_at"] < len(data)
    assert f"damaged after byte {found['facts']['damaged_at']}" in " ".join(found["sentences"])
    assert command("r7", "--log", str(log)) == 1
    assert re.search(
        r"has no request 'r7'; the log is cut or damaged at step [1-9]\d*, and the request may lie behind it\n",
        capsys.readouterr().err,
    )
    assert command("r0", "--log", str(log)) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_request_behind_a_cut_is_not_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = LoggedRun(log := tmp_path / "run.steps", LIMITS, CacheConfig(24, block_size=4), 5, snapshot_steps=16)
    for _ in range(100):
        run.do_something(1)
    run.finish()
    assert command("none", "--log", str(log)) == 1
    assert capsys.readouterr().err.endswith("has no request 'none'\n")
    data, snapshot = log.read_bytes(), LogFile(log)._found[2]
    for end in (snapshot.mark_at, snapshot.mark_at + 100):  # between two segments, and within one
        log.write_bytes(data[:end])
        assert command("none", "--log", str(log)) == 1
        cut = f"the log is cut or damaged at step {snapshot.place.num_steps}, and the request may lie behind it\n"
        assert capsys.readouterr().err.endswith(f"has no request 'none'; {cut}")


def test_a_request_in_a_damaged_middle_is_not_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LoggedRun(log := tmp_path / "run.steps", LIMITS, CacheConfig(24, block_size=4), 5, snapshot_steps=16)
    for _ in range(100):
        run.do_something(1)
    run.finish()
    data, middle, last = log.read_bytes(), LogFile(log)._found[2], LogFile(log)._found[-1]
    assert command("none", "--log", str(log)) == 1
    assert capsys.readouterr().err.endswith("has no request 'none'\n")
    at = middle.mark_at + 40
    log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert LogFile(log)._found[-1] == last  # what is behind the damage is used for requests of then
    assert command("none", "--log", str(log)) == 1
    cut = f"the log is cut or damaged at step {middle.place.num_steps}, and the request may lie behind it\n"
    assert capsys.readouterr().err.endswith(f"has no request 'none'; {cut}")


def logged_run(folder: Path, snapshot_steps: int) -> Path:
    """The log of some 50 steps, with requests of every kind."""
    run = LoggedRun(
        log := folder / "run.steps", LIMITS, CacheConfig(24, block_size=4), 5, snapshot_steps=snapshot_steps
    )
    for _ in range(50):
        run.do_something(1)
    run.finish()
    return log


@pytest.mark.parametrize("snapshot_steps", [0, 16])
def test_a_long_replay_of_a_log_without_snapshots_is_announced(
    snapshot_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logged_run(tmp_path, snapshot_steps)
    assert command("r1", "--log", str(log)) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr("llmstack_insight.commands.explain.LONG_REPLAY_STEPS", 5)
    assert command("r1", "--log", str(log)) == 0
    assert ("has no snapshots" in capsys.readouterr().err) == (snapshot_steps == 0)


@pytest.mark.parametrize("snapshot_steps", [0, 16])
def test_a_request_that_is_not_in_a_log_is_sought_without_a_replay(
    snapshot_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logged_run(tmp_path, snapshot_steps)
    num_scheduled = 0
    schedule = Scheduler.schedule

    def counted(scheduler: Scheduler, now_s: float) -> SchedulerOutput:
        nonlocal num_scheduled
        num_scheduled += 1
        return schedule(scheduler, now_s)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    assert command("r1", "--log", str(log)) == 0
    assert num_scheduled > 0
    num_scheduled = 0
    assert command("none", "--log", str(log)) == 1
    assert "has no request 'none'" in capsys.readouterr().err
    assert num_scheduled == 0


@pytest.mark.parametrize("damage", [b"\x81\x80\x01", b"\x81\x90\x01", b"\xdf\xff\xff\xff\xff", b"\xc1"])
def test_a_header_that_cannot_be_read_is_one_sentence(
    damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = recorded_log(tmp_path / "steps.log")
    data = log.read_bytes()
    at = data.index(b"scheduler") - 2
    log.write_bytes(data[:at] + damage + data[at + len(damage) :])
    assert command("r4", "--log", str(log)) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_log_that_other_packages_decided_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = recorded_log(tmp_path / "steps.log")
    data = log.read_bytes()
    run = RecordedRun(data)
    header = encode_header(replace(run.header, scheduler={**run.header.scheduler, "max_num_batched_tokens": 7}))
    old_header = encode_header(run.header)
    assert data.startswith(bytes(old_header))
    first = Checkpoint(0, DecisionHash().digest())
    put_checkpoint(old_header, first)
    put_checkpoint(header, first)
    assert data.startswith(bytes(old_header))
    log.write_bytes(bytes(header) + data[len(old_header) :])
    assert command("r0", "--log", str(log)) == 1
    error = capsys.readouterr().err
    assert "step" in error
    assert "; it was made by " in error
    assert f"llmstack-engine-core {run.header.versions['llmstack-engine-core']}" in error
