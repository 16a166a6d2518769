"""Hooks and timings of offline runs: the states of a request as they happen, and when things happened to it."""

from __future__ import annotations

import pytest

from llmstack_engine_core import EventHook
from llmstack_llm import LLM, SamplingParams
from llmstack_llm.engine_args import EngineArgsError
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.metrics import Counter, Gauge, Vector
from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_llm.testing import write_model_folder
from llmstack_types import EngineReady, RequestEvent, SchedulerStats


class StatePrinter(EventHook):
    """The example of the documentation."""

    def on_status(self, event: RequestEvent) -> None:
        print(f"{event.request_id}: {event.status.name}")


class Keeper:
    """A stat logger that keeps what it receives."""

    def __init__(self) -> None:
        self.steps: list[SchedulerStats | None] = []
        self.finished: list[FinishedRequestStats] = []
        self.whole: list[tuple[int, int]] = []
        self.ready: EngineReady | None = None

    def log_engine_initialized(self, ready: EngineReady) -> None:
        self.ready = ready

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        self.steps.append(scheduler_stats)
        self.finished += iteration_stats.finished_requests
        self.whole += iteration_stats.whole_requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


def test_the_states_of_a_request_are_printed_as_they_happen(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model, runner="echo", event_hooks=[StatePrinter()]) as llm:
        stop = SamplingParams(max_tokens=50, stop_token_ids=[ord("b") - ord("!")], seed=0)
        (output,) = llm.generate("abc", stop, use_tqdm=False)
    states = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert output.outputs[0].finish_reason == "stop"
    assert states == ["WAITING", "RUNNING", "FINISHED_STOPPED"]


def test_hooks_cannot_run_beside_an_engine_core_in_another_process(model: str) -> None:
    with pytest.raises(EngineArgsError, match="event_hooks"):
        LLM(model, runner="echo", multiprocess=True, event_hooks=[StatePrinter()])


def test_a_request_knows_when_things_happened_to_it(model: str) -> None:
    with LLM(model, runner="echo") as llm:
        (output,) = llm.generate("abc", SamplingParams(max_tokens=4, seed=0), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    times = (
        metrics.arrival_time_s, metrics.queued_time_s, metrics.scheduled_time_s, metrics.first_token_time_s,
        metrics.last_token_time_s,
    )  # fmt: skip
    assert None not in times
    assert list(times) == sorted(times)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (4, 0)
    assert metrics.model_time_s > 0
    assert metrics.scheduler_time_s > 0


def test_without_statistics_only_the_front_ends_own_times_are_known(model: str) -> None:
    with LLM(model, runner="echo", disable_log_stats=True) as llm:
        (output,) = llm.generate("abc", SamplingParams(max_tokens=4, seed=0), use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.scheduled_time_s is None
    assert output.metrics.first_token_time_s is not None


def test_a_users_stat_logger_receives_every_step_and_request(model: str) -> None:
    keeper = Keeper()
    with LLM(model, runner="echo", stat_loggers=[keeper]) as llm:
        llm.generate(["abc", "defg"], SamplingParams(max_tokens=4, n=2, seed=0), use_tqdm=False)
    assert keeper.ready is not None
    steps = [stats.step for stats in keeper.steps if stats is not None]
    assert steps == list(range(1, len(steps) + 1))
    assert keeper.whole == [(2, 4)] * 2
    assert len(keeper.finished) == 4
    for finished in keeper.finished:
        assert finished.queue_time_s is not None
        assert finished.inference_time_s == pytest.approx(finished.prefill_time_s + finished.decode_time_s)
        assert finished.e2e_latency_s == pytest.approx(finished.queue_time_s + finished.inference_time_s)


def test_preemptions_are_counted_where_they_happened(model: str) -> None:
    keeper = Keeper()
    with LLM(
        model, runner="echo", stat_loggers=[keeper], num_kv_blocks=6, block_size=4, max_model_len=24,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=16, ignore_eos=True, seed=0)
        outputs = llm.generate([[1, 2, 3, 4, 5, 6]] * 2, params, use_tqdm=False)
    counted = [output.metrics.num_preemptions for output in outputs if output.metrics]
    last = keeper.steps[-1]
    assert last is not None
    assert sum(counted) == last.num_preemptions > 0
    assert sorted(finished.num_preemptions for finished in keeper.finished) == sorted(counted)


def test_the_trace_of_an_offline_run_has_its_lines_in_order(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSTACK_TRACE", "1")
    with LLM(model, runner="echo") as llm:
        llm.generate("abc", SamplingParams(max_tokens=2, seed=0), use_tqdm=False)
    modules = [
        line.partition("(")[2].partition(")")[0]
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("[TRACE]")
    ]
    assert modules == [
        "input_processor", "input_processor", "scheduler",
        "scheduler", "scheduler", "model_runner", "engine_core", "engine_core", "output_processor",
        "scheduler", "model_runner", "scheduler", "engine_core", "engine_core", "output_processor", "output_processor",
    ]  # fmt: skip


def test_without_a_trace_no_object_knows_of_one(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model, runner="echo") as llm:
        assert type(llm.llm_engine.input_processor) is InputProcessor
        assert type(llm.llm_engine.output_processor) is OutputProcessor
        llm.generate("abc", SamplingParams(max_tokens=2, seed=0), use_tqdm=False)
    assert "[TRACE]" not in capsys.readouterr().err


def test_what_was_counted_can_be_read(model: str) -> None:
    with LLM(model, runner="echo", speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        llm.generate(["abab" * 3, "b"], SamplingParams(max_tokens=6, seed=0, ignore_eos=True), use_tqdm=False)
        metrics = llm.get_metrics()
    counted = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter | Gauge)}
    assert counted["vllm:generation_tokens"] == 12
    assert counted["vllm:prompt_tokens"] == 13
    assert counted["vllm:num_requests_running"] == 0
    ends = [metric for metric in metrics if metric.labels.get("finished_reason") == "length"]
    assert ends == [Counter("vllm:request_success", {**ends[0].labels}, 2)]
    (accepted,) = (metric for metric in metrics if isinstance(metric, Vector))
    assert sum(accepted.values) == counted["vllm:spec_decode_num_accepted_tokens"] > 0
