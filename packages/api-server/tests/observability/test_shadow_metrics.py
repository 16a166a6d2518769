"""What a shadow scheduler reports, as metrics and as sentences; operators alone see it."""

from __future__ import annotations

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.app import build_app
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.observability.shadow_metrics import sentences
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_types import ShadowFigures, ShadowReport

REPORT = ShadowReport(
    "max_num_seqs=4", "", 10, 3, 1.5, 0.25, 4,
    ShadowFigures(2.0, 1.0, 5.0, 2), ShadowFigures(2.2, 1.1, 5.5, 2), ShadowFigures(1.1, 0.1, 5.5, 0),
    ShadowFigures(0.8, 0.4, 2.0, 1), ShadowFigures(0.8, 0.4, 2.0, 1), ShadowFigures(0.4, 0.0, 2.0, 0),
)  # fmt: skip
KEYS = (Secret("first-key"), Secret("second-key"))


def record(metrics: ServerMetrics, *reports: ShadowReport, engine_index: int = 0) -> None:
    for report in reports:
        metrics.record(None, IterationStats(engine_index=engine_index, shadow=report))


def shown(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line.startswith("llmstack:shadow_")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_counters_grow_by_what_is_new_and_a_new_shadow_starts_at_zero() -> None:
    metrics = ServerMetrics("m")
    assert "shadow" not in metrics.render().decode()
    later = REPORT._replace(num_requests=14, cpu_s=0.5, shadow=ShadowFigures(2.1, 0.1, 6.0, 1))
    restarted = ShadowReport("max_num_seqs=4", num_requests=2, real=ShadowFigures(0.5))
    record(metrics, REPORT, later, restarted)
    found = shown(metrics.render().decode())
    labels = 'engine="0",model_name="m"'
    assert found[f"llmstack:shadow_requests_total{{{labels}}}"] == 16
    assert found[f"llmstack:shadow_cpu_seconds_total{{{labels}}}"] == 0.5
    name = "llmstack:shadow_time_to_first_token_seconds_total"
    by_plane = {plane: found[f'{name}{{{labels},plane="{plane}"}}'] for plane in ("real", "unchanged", "shadow")}
    assert by_plane == {"real": 2.5, "unchanged": 2.2, "shadow": 2.1}
    assert found[f'llmstack:shadow_is_running{{{labels},shadow="max_num_seqs=4"}}'] == 1
    record(metrics, REPORT._replace(problem="out of memory"))
    assert shown(metrics.render().decode())[f'llmstack:shadow_is_running{{{labels},shadow="max_num_seqs=4"}}'] == 0


def test_sentences_compare_what_is_estimated_and_name_what_was_measured() -> None:
    first, answer, preempted, shed, cost = sentences(REPORT)
    assert first.startswith("The first token would have come 50 % earlier: after 100 ms rather than 200 ms")
    assert first.endswith("It really came after 200 ms.")
    assert answer.startswith("The whole answer would have come as early")
    assert preempted == "It would have preempted 0 times rather than once, both estimated. It really happened once."
    as_often = REPORT._replace(recent_real=ShadowFigures(), recent_shadow=REPORT.recent_unchanged)
    assert (
        sentences(as_often)[2] == "It would have preempted as often, once, both estimated. It really happened 0 times."
    )
    assert "3 steps and requests" in shed
    assert "1.5 s behind" in cost
    ended = sentences(ShadowReport("fair", "RuntimeError: out of ideas"))
    assert ended[:2] == ["It has ended: RuntimeError: out of ideas.", "No requests were compared yet."]


def test_several_processes_that_receive_the_same_report_count_it_once() -> None:
    one, two = ServerMetrics("m"), ServerMetrics("m")
    record(one, REPORT)
    record(two, REPORT._replace(num_requests=12))
    found = shown(one.render([two.snapshot()]).decode())
    assert found['llmstack:shadow_requests_total{engine="0",model_name="m"}'] == 12


async def test_other_keys_do_not_see_it() -> None:
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    record(state.metrics, REPORT)
    answer = await call(build_app(state), "GET", "/metrics", headers={"authorization": "Bearer first-key"})
    assert "llmstack:lifecycle_state" in answer.body.decode()
    assert "shadow" not in answer.body.decode()
    opened = ready_state(FakeEngineClient(), HTTPConfig(api_keys=KEYS[:1], has_open_metrics=True))
    record(opened.metrics, REPORT)
    answer = await call(build_app(opened), "GET", "/metrics")
    assert (answer.status, "shadow" in answer.body.decode()) == (200, False)
    alone = ready_state(FakeEngineClient(), HTTPConfig(api_keys=KEYS[:1]))
    record(alone.metrics, REPORT)
    answer = await call(build_app(alone), "GET", "/metrics", headers={"authorization": "Bearer first-key"})
    assert "vllm:shadow_requests_total" in answer.body.decode()
