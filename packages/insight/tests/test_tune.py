"""A search over settings, on runs whose best settings are known."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client.prediction.cost_model import LinearCostModel
from llmstack_insight.commands.tune import TuneCommand
from llmstack_insight.rerun import ControlPlane, Outcome, RecordedRequest
from llmstack_insight.tune import Figures, SearchLimits, Space, TargetError, figures_of, parse_target, search
from llmstack_insight.tune import check as check_module
from llmstack_insight.tune.arrivals import at_speed, sendable, write_load
from llmstack_step_log import FileSink, LoggedScheduler, LogHeader, StepLog
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

MODEL = LinearCostModel(0.01, 0.0005, 0.0001, 0.0)


def recorded(number: int, arrival_s: float, num_prompt: int, num_output: int, **values: Any) -> RecordedRequest:
    request = EngineCoreRequest(
        f"r{number}", [number, *range(1, num_prompt)], SamplingParams(max_tokens=num_output, ignore_eos=True), **values
    )
    return RecordedRequest(request, arrival_s, number, [7] * num_output)


def plane(num_blocks: int = 256, **changes: Any) -> ControlPlane:
    limits = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return ControlPlane(SchedulerConfig(**(limits | changes)), CacheConfig(num_blocks))


BURST = [recorded(number, 0.001 * number, 40, 20) for number in range(32)]


def test_places_are_added_where_requests_wait_for_one() -> None:
    target = parse_target("queue_p99<700ms")
    found = search(BURST, plane(max_num_seqs=2, max_num_batched_tokens=2048), MODEL, target, Space())
    assert not target.is_met(found.unchanged.figures)
    assert target.is_met(found.best.figures)
    assert int(found.best.settings["max_num_seqs"]) >= 8
    assert found.is_complete


def test_a_smaller_budget_is_found_where_prompts_make_tokens_late() -> None:
    requests = [recorded(0, 0.0, 10, 60), *(recorded(one, 0.05 * one, 400, 2) for one in range(1, 8))]
    target = parse_target("tpot_max<60ms")
    found = search(requests, plane(max_num_batched_tokens=512), MODEL, target, Space())
    assert not target.is_met(found.unchanged.figures)
    assert target.is_met(found.best.figures)
    changed = {"max_num_batched_tokens", "long_prefill_token_threshold", "max_num_seqs"}
    assert changed & set(found.best.settings)


def test_blocks_are_added_only_up_to_the_given_number() -> None:
    target = parse_target("preemptions<=0")
    small = plane(8, max_num_seqs=8, max_num_batched_tokens=512)
    none = search(BURST[:8], small, MODEL, target, Space(policies=("fcfs",)), SearchLimits(200))
    more = search(BURST[:8], small, MODEL, target, Space(("fcfs",), 32), SearchLimits(200))
    assert "num_blocks" not in none.best.settings
    assert target.is_met(more.best.figures)


def test_a_policy_is_tried_where_requests_differ_by_it() -> None:
    plain = [recorded(0, 0.0, 10, 5), recorded(1, 0.0, 10, 5)]
    urgent = [recorded(0, 0.0, 10, 5), recorded(1, 0.0, 10, 5, priority=-1)]
    tenants = [recorded(0, 0.0, 10, 5, tenant="a"), recorded(1, 0.0, 10, 5, tenant="b", deadline_s=1.0)]
    assert Space.of(plain, "fcfs").policies == ("fcfs",)
    assert Space.of(urgent, "fcfs").policies == ("fcfs", "priority")
    assert Space.of(tenants, "priority").policies == ("priority", "fcfs", "fair", "deadline")


def test_the_search_is_bounded_in_runs_and_in_time() -> None:
    target = parse_target("ttft_p50<1us")
    few = search(BURST[:4], plane(), MODEL, target, Space(), SearchLimits(max_runs=3))
    assert (few.num_tried, few.is_complete) == (3, False)
    ticks = iter(range(1000))
    late = search(BURST[:4], plane(), MODEL, target, Space(), SearchLimits(max_seconds=4.0), lambda: float(next(ticks)))
    assert late.num_tried < 5
    assert not late.is_complete


def test_settings_that_refuse_more_requests_are_no_better() -> None:
    requests = [recorded(0, 0.0, 200, 5), recorded(1, 0.0, 10, 5)]
    found = search(requests, plane(), MODEL, parse_target("ttft_max<1us"), Space())
    assert found.best.figures.plain["refused"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "1 to 8 conditions"),
        (",".join(["ttft_p99<1s"] * 9), "1 to 8 conditions"),
        ("ttft_p99", "no condition"),
        ("ttft_p99=500ms", "no condition"),
        ("ttft_p99<500", "needs a unit"),
        ("ttft_p99<500kg", "needs a unit"),
        ("preemptions<5ms", "has no unit"),
        ("latency_p99<5ms", "no figure 'latency_p99'"),
        ("ttft<5ms", "after ttft_ comes"),
        ("ttft_p0<5ms", "after ttft_ comes"),
        ("ttft_p100<5ms", "after ttft_ comes"),
        ("ttft_p99<1.2.3s", "no number"),
        ("ttft_p99<1e999s", "too large"),
    ],
)
def test_what_is_no_target_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(TargetError) as raised:
        parse_target(text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_figures_are_by_nearest_rank_and_conditions_compare_them() -> None:
    outcomes = [Outcome(0.0, number / 100, number / 10, 11) for number in range(1, 101)]
    figures = figures_of([*outcomes, None], 10.0)
    assert [figures.value(f"ttft_{name}") for name in ("p1", "p50", "p99", "p99.9", "max")] == [
        0.01, 0.5, 0.99, 1.0, 1.0,
    ]  # fmt: skip
    assert figures.value("ttft_mean") == pytest.approx(0.505)
    assert figures.plain == {"preemptions": 0, "refused": 1, "output_tokens_per_s": 110.0}
    for text, is_met in (
        ("ttft_p50<500ms", False), ("ttft_p50<=500ms", True), ("ttft_p99<1s, preemptions<=0", True),
        ("output_tokens_per_s>110", False), ("output_tokens_per_s>=110", True), ("refused<1", False),
    ):  # fmt: skip
        assert parse_target(text).is_met(figures) is is_met, text
    assert not parse_target("ttft_p99<1s").is_met(Figures())


def test_requests_can_come_faster() -> None:
    fast = at_speed([recorded(0, 10.0, 4, 1), recorded(1, 14.0, 4, 1, deadline_s=20.0)], 4.0)
    assert [one.arrival_s for one in fast] == [10.0, 11.0]
    assert fast[1].request.deadline_s == 17.0


def write_log(path: Path, num_requests: int = 12) -> None:
    """A log of a run whose steps take as long as MODEL says."""
    config, cache = plane(max_num_seqs=2).scheduler, CacheConfig(256)
    log = StepLog(LogHeader.of(config, cache, {}), FileSink(str(path)))
    scheduler, now_s = LoggedScheduler(ControlPlane(config, cache).build(), log), 10.0
    for number in range(num_requests):
        scheduler.add_request(replace(recorded(number, 0.0, 40, 10).request, arrival_time_s=now_s))
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(now_s)
        rows = scheduled.scheduled_requests
        prefill = sum(row.num_scheduled_tokens for row in rows if row.num_scheduled_tokens > 1)
        now_s += 0.01 + 0.0005 * prefill + 0.0001 * sum(row.num_scheduled_tokens == 1 for row in rows)
        is_whole = [row.num_computed_tokens + row.num_scheduled_tokens >= 40 for row in rows]
        output = ModelRunnerOutput([row.request_id for row in rows], [[7] if whole else [] for whole in is_whole])
        scheduler.update_from_output(scheduled, output, now_s)
    log.close()


def tune(*words: str) -> int:
    command, parser = TuneCommand(), argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_the_command_prints_a_line_for_the_server_with_its_figures(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "steps.bin"
    write_log(path)
    words = ("--log", str(path), "--target", "ttft_p99<400ms", "--serve-cmd", "llmstack serve gpt2 --max-num-seqs=2")
    assert tune(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_met"] is True
    assert found["command"][:3] == ["llmstack", "serve", "gpt2"]
    assert "--max-num-seqs" in found["command"]
    assert "--max-num-seqs=2" not in found["command"]
    [condition] = found["target"]
    assert condition["recorded"] > 0.4 > condition["expected"]
    # The cost model was fitted to the log, so the unchanged settings give what the log has.
    assert condition["unchanged"] == pytest.approx(condition["recorded"], rel=0.02)
    assert tune(*words) == 0
    text = capsys.readouterr().out
    assert text.startswith("llmstack serve gpt2 --")
    assert "is expected to be met" in text
    assert "error of" in text


def test_a_target_that_nothing_meets_is_said_with_the_nearest_settings(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "steps.bin"
    write_log(path)
    assert tune("--log", str(path), "--target", "ttft_p99<1us", "--max-runs", "6") == 1
    assert "NOT expected to be met" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--target", "ttft<1"], 2, "--target: "),
        (["--target", "ttft_p99<1s", "--log", "/nowhere/steps.bin"], 1, "cannot be read"),
        (["--target", "ttft_p99<1s", "--check"], 1, "--check: needs --serve-cmd"),
        (["--target", "ttft_p99<1s", "--serve-cmd", "llmstack serve 'gpt2"], 1, "--serve-cmd: No closing quotation"),
        (["--target", "ttft_p99<1s", "--policy", "best"], 1, "--policy: there is no policy"),
        (["--target", "ttft_p99<1s", "--cost-model", "/nowhere/costs.json"], 1, "cannot be read"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line(
    words: list[str], code: int, said: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "steps.bin"
    write_log(path, 4)
    assert tune("--log", str(path), *words) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_log_of_too_few_steps_calibrates_nothing(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "steps.bin"
    write_log(path, 1)
    assert tune("--log", str(path), "--target", "ttft_p99<1s") == 1
    assert "at least 16" in capsys.readouterr().err


def test_the_load_of_a_check_is_that_of_the_log(tmp_path: Path) -> None:
    requests = [recorded(0, 5.0, 4, 3), recorded(1, 5.5, 4, 0), recorded(2, 6.0, 5, 2)]
    path = tmp_path / "load.jsonl"
    write_load(sendable(requests, 10), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(len(line["prompt_token_ids"]), line["output_tokens"], line["timestamp"]) for line in lines] == [
        (4, 3, 0.0), (5, 2, 1000.0),
    ]  # fmt: skip
    assert len(sendable(requests, 1)) == 1


def test_a_check_that_fails_says_what_the_benchmark_said(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "steps.bin"
    write_log(path)
    words = ("--log", str(path), "--target", "ttft_p99<1s", "--max-runs", "1", "--check-url", "http://127.0.0.1:1")
    script = "import sys; sys.stderr.write('first\\nthe server is gone\\n'); sys.exit(3)"
    monkeypatch.setattr(check_module, "COMMAND", (check_module.sys.executable, "-c", script))
    assert tune(*words) == 1
    assert "ended with 3: the server is gone" in capsys.readouterr().err
