"""Predicted first tokens over HTTP: the header, the estimate, and deadlines that cannot be met."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.first_token_check import JITTER
from llmstack_types import RequestProgress, SchedulerStats, StepPhases

HEADER = "x-llmstack-predicted-ttft-ms"
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TURN = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2},
    CHAT: TURN,
    MESSAGES: {**TURN, "model": "m"},
    RESPONSES: {"input": "Hello", "max_output_tokens": 16, "store": False},
}
# A step takes a second, and 10 ms per prompt token.
BASE_S, TOKEN_S = 1.0, 0.01


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def calibrate(monitor: QueueMonitor, clock: Clock, num_steps: int = 40, **last: int) -> None:
    """Steps of an engine core with one decode; the last one ends now, and leaves what `last` says."""
    durations = [BASE_S + TOKEN_S * 100 * (number % 3) for number in range(num_steps)]
    for number, seconds in enumerate(durations):
        clock.now_s += seconds
        stats = SchedulerStats(
            step=number + 1, num_running=1, num_scheduled_rows=1, num_scheduled_tokens=1 + 100 * (number % 3),
            **(last if number == num_steps - 1 else {}),
        )  # fmt: skip
        monitor.record(stats, IterationStats(timestamp_s=clock.now_s, phases=StepPhases(0.0, seconds, 0.0)))


def measured_server(engine: FakeEngineClient | None = None, **last: int) -> tuple[Any, ServerState]:
    """A server in whose engine core a step begins now: a request waits for its end, at least a second."""
    state = ready_state(engine or FakeEngineClient(), HTTPConfig())
    clock = Clock()
    state.queue = QueueMonitor(clock=clock)
    calibrate(state.queue, clock, **last)
    return build_app(state), state


async def post(app: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    return await call(app, "POST", path, body, headers or {})


@pytest.mark.parametrize("path", BODIES)
async def test_every_generated_answer_says_when_its_first_token_was_expected(path):
    state = ready_state(FakeEngineClient(), HTTPConfig())
    clock = Clock()
    state.queue = QueueMonitor(clock=clock)
    app = build_app(state)
    body = {**BODIES[path], "model": state.served_model_name}
    for _ in range(2):
        answer = await post(app, path, body)
        assert (answer.status, HEADER in answer.headers) == (200, False)
        answer = await post(app, path, {**body, "stream": True})
        assert (answer.status, HEADER in answer.headers) == (200, False)
    calibrate(state.queue, clock)
    for is_stream in (False, True):
        answer = await post(app, path, {**body, "stream": is_stream})
        # The step under way, and one with the prompt.
        assert 2000 <= int(answer.headers[HEADER]) <= 2400


async def test_a_request_takes_its_place_for_as_many_tokens_as_it_asks_for():
    state = ready_state(FakeEngineClient(), HTTPConfig(max_queue_wait_s=None))
    clock = Clock()
    state.queue = QueueMonitor(1, clock=clock)
    running = RequestProgress(9, 90, 100, can_stop=False)
    state.queue.first_tokens.progress = lambda _: [running]
    calibrate(state.queue, clock)
    app = build_app(state)
    expected = []
    for num_tokens in (5, 10, 1):
        body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True}
        expected.append(int((await post(app, COMPLETIONS, body)).headers[HEADER]) / 1000)
    assert expected == pytest.approx([11, 16, 26], rel=0.1)


async def test_an_answer_without_a_first_token_has_no_prediction():
    app, _ = measured_server()
    answer = await post(app, COMPLETIONS, {"prompt": "Hello", "temperature": 9})
    assert (answer.status, HEADER in answer.headers) == (400, False)


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({"prompt_tokens": 100}, 100),
        ({"prompt_tokens": 100, "max_tokens": 20}, 100),
        ({"prompt": [5] * 100}, 100),
        ({"prompt": ["Hello", "Hello again"]}, 5),
        (TURN, 5),
    ],
)
async def test_an_estimate_says_when_the_first_token_would_come_and_computes_nothing(body, num_tokens):
    app, state = measured_server()
    answer = await post(app, "/v1/estimate", body)
    found = answer.json()
    assert answer.status == 200
    assert (found["object"], found["prompt_tokens"]) == ("estimate", num_tokens)
    assert found["predicted_wait_ms"] == pytest.approx(1000, rel=0.05)
    assert found["predicted_ttft_ms"] == pytest.approx(2000 + 10 * num_tokens, rel=0.05)
    assert (found["deadline_ms"], found["can_meet_deadline"]) == (None, None)
    assert not state.engine.admitted


async def test_an_estimate_says_whether_a_deadline_can_be_met():
    app, _ = measured_server()
    found = {
        deadline_ms: (await post(app, "/v1/estimate", {"prompt_tokens": 100, "deadline_ms": deadline_ms})).json()
        for deadline_ms in (2000, 5000)
    }
    assert {deadline_ms: one["can_meet_deadline"] for deadline_ms, one in found.items()} == {2000: False, 5000: True}


async def test_without_measured_steps_an_estimate_is_refused():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig()))
    answer = await post(app, "/v1/estimate", {"prompt_tokens": 10})
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 10**9}, "prompt_tokens"),
        ({"prompt_tokens": "many"}, "prompt_tokens"),
        ({"prompt_tokens": 5, "max_tokens": -1}, "max_tokens"),
        ({"prompt_tokens": 5, "deadline_ms": 0}, "deadline_ms"),
        ({"prompt": []}, "prompt"),
    ],
)
async def test_a_bad_field_of_an_estimate_is_named(body, param):
    app, _ = measured_server()
    answer = await post(app, "/v1/estimate", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_an_estimate_needs_the_key():
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("k"),)))
    assert (await post(build_app(state), "/v1/estimate", {"prompt_tokens": 5})).status == 401


@pytest.mark.parametrize("where", ["header", "body"])
async def test_a_deadline_that_the_first_token_cannot_meet_is_refused_last(where):
    app, state = measured_server()
    body: dict[str, Any] = {"prompt": [5] * 100, "max_tokens": 2}
    headers = {}
    if where == "header":
        headers["x-llmstack-deadline-ms"] = "2000"
    else:
        body["deadline_ms"] = 2000
    assert (await post(app, COMPLETIONS, {**body, "temperature": 9}, headers)).status == 400
    answer = await post(app, COMPLETIONS, body, headers)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (503, "deadline_unreachable")
    assert error["message"] == "The predicted wait of 3.0 seconds is beyond the request's deadline of 2 seconds."
    assert 3000 * (1 - JITTER) * 0.95 <= int(answer.headers["retry-after-ms"]) <= 3000 * (1 + JITTER) * 1.05
    assert not state.engine.admitted
    assert b'reason="deadline"} 1.0' in state.metrics.render()
    # Nothing of it is left in the queue.
    found = (await post(app, "/v1/estimate", {"prompt_tokens": 100, "deadline_ms": 4000})).json()
    assert found["predicted_wait_ms"] == pytest.approx(1000, rel=0.05)


async def test_a_prompt_that_was_submitted_delays_the_next_one():
    app, state = measured_server()
    before = (await post(app, "/v1/estimate", {"prompt_tokens": 10})).json()["predicted_wait_ms"]
    with state.queue.pending(100, ""):
        state.queue.admit(100_000, 0, None)
        behind = (await post(app, "/v1/estimate", {"prompt_tokens": 10})).json()["predicted_wait_ms"]
    after = (await post(app, "/v1/estimate", {"prompt_tokens": 10})).json()["predicted_wait_ms"]
    assert behind > before + 500_000  # 100,000 tokens at 10 ms each, and the steps
    assert after == before


async def test_the_errors_of_predictions_are_metrics():
    _, state = measured_server()
    with state.queue.pending(100, "") as request:
        admitted = state.queue.admit(100, 0, None)
        assert admitted is request
    assert request.prediction is not None
    state.metrics.observe_prediction(2.0, 2.5)
    text = state.metrics.render().decode()
    for name, ends in (("ratio", ("0.1", "0.25")), ("seconds", ("0.25", "0.5"))):
        labels = [f'{{le="{end}",model_name="{state.served_model_name}"}}' for end in ends]
        counts = [f"llmstack:ttft_prediction_error_{name}_bucket{label}" for label in labels]
        assert f"{counts[0]} 0.0" in text
        assert f"{counts[1]} 1.0" in text
