"""A recorded run is derived again, proved by its hash, and compared with what other rules decide."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_core_helpers.small_cores import run_with_a_yield
from hypothesis import given, settings
from hypothesis import strategies as st

import llmstack_core_scheduler
from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_insight.commands.replay import ReplayCommand
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_step_log import LogHeader, RecordedRun, RingSink, StepLogError, read_step_log
from llmstack_step_log.decisions import (
    pack_refused,
    pack_reset,
    pack_scheduled,
    pack_updated,
    scheduled_rows,
    unpack_decision,
    updated_rows,
)
from llmstack_step_log.replay import Decision, DecisionsDifferError, verify
from llmstack_step_log.replay.compare import Difference, describe
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStartError,
    FinishReason,
    ModelRunnerConfig,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


MODEL = ModelRunnerConfig("echo?vocab_size=100&error_request_id=r5", block_size=4, **LIMITS)
MODES: dict[str, dict[str, object]] = {
    "plain": {},
    "ahead": {"async_scheduling": True},
    "fair": {"scheduler": SchedulerConfig(policy="fair", fair_quantum=5, **LIMITS)},
    "deadline": {"scheduler": SchedulerConfig(policy="deadline", fair_quantum=5, **LIMITS)},
    "drafts": {
        "model": replace(MODEL, max_num_drafts=4),
        "scheduler": SchedulerConfig(speculative=SpeculativeConfig("ngram", 4), **LIMITS),
    },
}


def build(num_blocks: int = 10, **changes: object) -> EngineCore:
    config = EngineConfig(
        MODEL,
        runner="echo",
        scheduler=SchedulerConfig(**LIMITS),
        num_blocks=num_blocks,
    )
    return build_engine_core(replace(config, **changes))


def run_messily(core: EngineCore, seed: int = 0, num_requests: int = 12) -> None:
    """Arrivals, duplicates, refusals, aborts, shared prompts, failing rows and a full pool, from one seed."""
    rng = random.Random(seed)
    waiting = [f"r{index}" for index in range(num_requests)]
    while waiting or core.has_unfinished_requests():
        if waiting and rng.random() < 0.4:
            request_id = waiting.pop()
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)] + [rng.randrange(100)] * rng.randint(1, 8)
            params = SamplingParams(
                max_tokens=rng.choice([1, 5, 20, 1000]), seed=0, stop_token_ids=[rng.randrange(100)], logprobs=0
            )
            number = len(waiting)
            # Some of these pass while the requests wait.
            deadline_s = time.monotonic() + number / 1000 if number % 2 else None
            tenant, priority = f"t{number % 3}", rng.randrange(3)
            core.add_request(
                EngineCoreRequest(request_id, prompt, params, priority=priority, tenant=tenant, deadline_s=deadline_s)
            )
        if rng.random() < 0.1:
            core.abort_requests([f"r{rng.randrange(num_requests)}"])
        if rng.random() < 0.1:
            core.reset_prefix_cache()
        core.step()
    core.shutdown()


def dump(core: EngineCore) -> bytes:
    assert core.observers.step_log is not None
    assert isinstance(core.observers.step_log.sink, RingSink)
    return core.observers.step_log.sink.dump()


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.steps"
    run_messily(build(record_steps=str(path)), num_requests=20)
    return path


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    command, parser = ReplayCommand(), argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(list(map(str, arguments))))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(5, 30), st.sampled_from([0, 20]), st.sampled_from(sorted(MODES)))
def test_every_decision_of_a_messy_run_is_derived_again(
    seed: int, num_blocks: int, num_host_blocks: int, mode: str
) -> None:
    core = build(num_blocks, num_host_blocks=num_host_blocks, **MODES[mode])
    run_messily(core, seed)
    data = dump(core)
    report = verify(RecordedRun(data))
    assert report.num_steps == core.stats().step
    assert report.digest == RecordedRun(data).last.digest.hex()


def test_rows_that_yielded_their_places_are_decisions_that_a_replay_derives(tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    core = run_with_a_yield(str(path))
    core.shutdown()
    assert verify(read_step_log(path)).num_steps == core.stats().step
    states = [event[:2] for event in steps_of_log(read_step_log(path), max_steps=1000).events]
    assert states.count(("r3", RequestStatus.YIELDED)) == core.stats().num_preemptions == 1


def test_drafts_are_decisions_that_a_replay_compares() -> None:
    core = build(40, **MODES["drafts"])
    run_messily(core, 3)
    stats, run = core.stats(), RecordedRun(dump(core))
    assert 0 < stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert verify(run).num_steps == stats.step
    run.header = LogHeader({**run.header.scheduler, "speculative": None}, run.header.cache)
    with pytest.raises(DecisionsDifferError):
        verify(run)


def test_a_replay_says_what_it_has_proved(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(read_step_log(log_path))
    assert report.num_requests == 20
    code, out, err = replay(capsys, log_path)
    assert (code, err) == (0, "")
    assert out == (
        f"{log_path}: {report.num_steps} steps, 20 requests, {report.num_tokens} tokens: every decision is as "
        f"recorded, hash {report.digest}\n"
    )


def test_other_decisions_are_found_by_the_hash(log_path: Path) -> None:
    run = read_step_log(log_path)
    run.header = LogHeader({**run.header.scheduler, "max_num_batched_tokens": 15}, run.header.cache)
    with pytest.raises(DecisionsDifferError, match=r"not the recorded one|other rows"):
        verify(run)


@pytest.mark.parametrize(
    "against", ["priority", "max_num_batched_tokens=8", "num_blocks=50,enable_prefix_caching=false"]
)
def test_the_first_decision_that_differs_is_named_and_shown(
    against: str, log_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = replay(capsys, log_path, "--against", against)
    head, names, *lines = out.splitlines()
    assert code == 1
    assert "is at step" in head
    assert names.endswith(f" {against}")
    assert lines


def test_the_same_rules_decide_the_same(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for against in ("fcfs", "max_num_seqs=4", "llmstack_core_scheduler:Scheduler"):
        code, out, _ = replay(capsys, log_path, "--against", against)
        assert code == 0
        assert "none differs" in out


@pytest.mark.parametrize(
    ("against", "expected"),
    [
        ("0.0.9", "is no policy"),
        ("no_setting=3", "there is no setting 'no_setting'"),
        ("max_num_seqs=many", "must be a number"),
        ("enable_prefix_caching=1", "must be true or false"),
        ("no_module:Scheduler", "cannot be imported"),
        ("llmstack_core_scheduler:__name__", "cannot be called"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    against: str, expected: str, log_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = replay(capsys, log_path, "--against", against)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize("against", ["num_blocks=0", "max_num_seqs=0", "policy=lottery"])
def test_settings_that_cannot_be_are_refused_in_one_line(
    against: str, log_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = replay(capsys, log_path, "--against", against)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert against.partition("=")[0] in err


def test_another_installation_decides_in_a_process_of_its_own(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "llmstack_core_scheduler"
    shutil.copytree(Path(llmstack_core_scheduler.__file__).parent, package)
    assert replay(capsys, log_path, "--against", tmp_path)[0] == 0
    opening = package / "__init__.py"
    opening.write_text(f"{opening.read_text()}\nSchedulerConfig.max_num_rows = property(lambda self: 1)\n")
    code, out, _ = replay(capsys, log_path, "--against", tmp_path)
    assert code == 1
    assert "the first that differs" in out
    opening.write_text("raise RuntimeError('this one is broken')")
    code, out, err = replay(capsys, log_path, "--against", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "this one is broken" in err


def test_a_folder_without_packages_is_refused(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = replay(capsys, log_path, "--against", tmp_path)
    assert code == 1
    assert "no packages of llmstack" in err


def test_files_that_are_no_whole_log_are_refused_in_one_line(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = log_path.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for content, expected in (
        (b"", "is no log"), (data[:-1], "truncated"), (data[:-100], "truncated"), (changed, "damaged"),
    ):  # fmt: skip
        path = tmp_path / "broken"
        path.write_bytes(content)
        code, out, err = replay(capsys, path)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert expected in err
    assert "No such file" in replay(capsys, tmp_path / "absent")[2]


def test_a_run_whose_process_was_killed_is_proved_as_far_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.steps"
    core = build(record_steps=str(path))
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=9, seed=0)))
    while core.has_unfinished_requests():
        core.step()
    assert core.observers.step_log is not None
    core.observers.step_log.wait()  # for its thread
    code, out, _ = replay(capsys, path)
    assert code == 0
    assert "9 steps" in out or "10 steps" in out
    assert "not closed" in out
    core.shutdown()


def test_a_ring_that_has_lost_its_beginning_cannot_be_replayed() -> None:
    core = build(step_log_bytes=1000)
    run_messily(core)
    with pytest.raises(StepLogError, match=r"lacks its first \d+ steps"):
        verify(RecordedRun(dump(core)))


def test_a_log_can_be_switched_off_and_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    assert build(step_log_bytes=0).observers.step_log is None
    with pytest.raises(EngineStartError, match="--record-steps"):
        build(record_steps=str(tmp_path / "absent" / "run.steps"))
    with pytest.raises(ValueError, match="step_log_bytes"):
        build(step_log_bytes=-1)


ids = st.text(max_size=4)
counts = st.integers(0, 2**20)


@given(
    st.lists(st.builds(ScheduledRequest, ids, counts, counts, st.lists(counts, max_size=3), st.just([])), max_size=6),
    st.lists(st.lists(counts, max_size=3), max_size=6, unique_by=tuple),
)
def test_a_packed_decision_can_be_read_again(rows: list[ScheduledRequest], token_ids: list[list[int]]) -> None:
    kind, decided = unpack_decision(pack_scheduled(SchedulerOutput(7, [], rows)))
    assert (kind, decided["step"]) == ("scheduled", 7)
    assert [row[:4] for row in scheduled_rows(decided)] == [(*row[:3], row.new_block_ids or None) for row in rows]
    outputs = [EngineCoreOutput(str(index), tokens) for index, tokens in enumerate(token_ids)]
    if outputs:
        outputs[-1] = outputs[-1]._replace(finish_reason=FinishReason.STOP, num_cached_tokens=0)
    kind, decided = unpack_decision(pack_updated(EngineCoreOutputs(outputs)))
    assert kind == "updated"
    expected = {output.request_id: {"new_token_ids": output.new_token_ids} for output in outputs}
    if outputs:
        expected[outputs[-1].request_id] |= {"finish_reason": "stop", "num_cached_tokens": 0}
    assert updated_rows(decided) == expected


def test_decisions_of_every_kind_are_shown() -> None:
    outputs = [EngineCoreOutput("a", [5, 6], finish_reason=FinishReason.LENGTH), EngineCoreOutput("b", [7])]
    update = pack_updated(EngineCoreOutputs(outputs))
    sides = [Decision(3, 0, packed) for packed in (update, pack_refused("r"), pack_reset(False), pack_reset(True))]
    texts = [describe(Difference(one, None), "ours", "theirs") for one in sides]
    assert "finish_reason length, new_token_ids [5, 6]" in texts[0]
    assert "request r is refused" in texts[1]
    assert "not forgotten" in texts[2]
    assert "is forgotten" in texts[3]
    assert all("none, the run is over" in text for text in texts)
    long = pack_updated(EngineCoreOutputs([EngineCoreOutput(f"r{index}", [index]) for index in range(40)]))
    assert "25 lines more" in describe(Difference(Decision(3, 0, long), None), "ours", "theirs")


def test_the_commands_import_nothing_heavy() -> None:
    code = (
        "import argparse, sys\n"
        "from llmstack_insight.commands.replay import ReplayCommand\n"
        "from llmstack_insight.commands.simulate import SimulateCommand\n"
        "SimulateCommand().add_arguments(argparse.ArgumentParser())\n"
        "heavy = ('torch', 'zmq', 'msgpack', 'llmstack_step_log', 'llmstack_core_scheduler')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
