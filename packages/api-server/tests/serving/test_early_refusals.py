"""Refusals of an overloaded server are written when the headers are read, and are those of the application."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from server_helpers.overload import overload

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import RateLimits
from llmstack_server.options.secret import Secret
from llmstack_server.serving.early_refusals import EarlyRefusal, early_refusal
from llmstack_server.state.first_tokens import Lateness
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.routes import RouteTable

HEADERS = [(b"host", b"localhost"), (b"content-length", b"40"), (b"x-request-id", b"mine")]
FAR_S = float("inf")  # what comes then has not waited


def waiting_paths() -> list[str]:
    return [spec.path for _, spec in build_app(ready_state(FakeEngineClient())).table.routes if spec.waits]


def overloaded(wait_s: float = 100.0, **options: Any) -> ServerState:
    return overload(ready_state(FakeEngineClient(), HTTPConfig(**options)), wait_s)


def refusal_of(state: ServerState) -> EarlyRefusal | None:
    return early_refusal(state, build_app(state).table)


def without_seconds(error: Any) -> str:
    """The text of an error without the time until the first token, which grows meanwhile."""
    return re.sub(r"in [0-9.]+ seconds, beyond", "in some seconds, beyond", json.dumps(error))


@pytest.mark.parametrize("path", waiting_paths())
async def test_an_early_refusal_is_the_one_of_the_application(path: str):
    state = overloaded()
    refuse = refusal_of(state)
    assert refuse is not None
    early = refuse(path, HEADERS, FAR_S)
    late = await call(build_app(state), "POST", path, b"x" * 40, {"x-request-id": "mine"})
    assert early is not None
    assert early.status == late.status == (529 if path == "/v1/messages" else 503)
    assert without_seconds(json.loads(early.encoded())) == without_seconds(late.json())
    assert early.headers.keys() == late.headers.keys() - {"content-type", "content-length"}
    assert early.headers["x-request-id"] == late.headers["x-request-id"] == "mine"
    metrics = state.metrics.render()
    assert b'reason="max_queue_wait"} 2.0' in metrics
    assert b"llmstack:refusal_seconds_count" in metrics


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", []),
        ("/tokenize", []),
        ("/v1/none", []),
        ("/v1/completions", [(b"idempotency-key", b"k")]),
        ("/v1/completions", [(b"x-llmstack-resume", b"5")]),
        ("/v1/completions", [(b"x-llmstack-deadline-ms", b"nonsense")]),
        ("/v1/completions", [(b"origin", b"https://example.org")]),
    ],
)
def test_what_may_have_another_answer_is_left_to_the_application(path: str, headers: list[tuple[bytes, bytes]]):
    refuse = refusal_of(overloaded())
    assert refuse is not None
    assert refuse(path, [*HEADERS, *headers], FAR_S) is None


def test_keys_and_the_state_of_the_server_come_first():
    state = overloaded(api_keys=(Secret("a"),))
    refuse = refusal_of(state)
    assert refuse is not None
    assert refuse("/v1/completions", HEADERS, FAR_S) is None
    known = [*HEADERS, (b"authorization", b"Bearer a")]
    assert refuse("/v1/completions", known, FAR_S) is not None
    state.lifecycle.advance(LifecycleState.DRAINING)
    assert refuse("/v1/completions", known, FAR_S) is None


@pytest.mark.parametrize("options", [{"middleware": ("mine:mark",)}, {"rate_limits": RateLimits(5, None)}])
def test_who_has_to_see_every_request_sees_refused_ones_too(options: dict[str, Any]):
    state = ready_state(FakeEngineClient(), HTTPConfig(**options))
    assert early_refusal(state, RouteTable(())) is None


@pytest.mark.parametrize("header", [(b"host", b"rebound.example"), (b"sec-fetch-site", b"cross-site")])
async def test_a_foreign_page_gets_the_refusal_of_the_application(header: tuple[bytes, bytes]):
    state = overloaded()
    refuse = refusal_of(state)
    assert refuse is not None
    headers = [own for own in HEADERS if own[0] != header[0]]
    assert refuse("/v1/completions", [*headers, header], FAR_S) is None
    given = {name.decode(): value.decode() for name, value in (*headers, header)}
    answer = await call(build_app(state), "POST", "/v1/completions", b"x" * 40, given)
    assert answer.json()["error"]["code"] == ("invalid_host" if header[0] == b"host" else "cross_site_request")


def test_a_wait_below_the_limit_is_no_refusal():
    refuse = refusal_of(overloaded(5.0))
    assert refuse is not None
    assert refuse("/v1/completions", HEADERS, FAR_S) is None


@pytest.mark.parametrize(
    ("media_type", "is_refused"), [(b"multipart/form-data; boundary=x", False), (b"text/plain", True)]
)
def test_the_bytes_of_a_file_are_no_tokens(media_type: bytes, is_refused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QueueMonitor, "seconds_after_wait", lambda self, num_tokens: num_tokens / 1000)
    state = overloaded(5.0)
    refuse = refusal_of(state)
    assert refuse is not None
    upload = [(b"host", b"localhost"), (b"content-length", b"25000000"), (b"content-type", media_type)]
    assert (refuse("/v1/audio/transcriptions", upload, FAR_S) is not None) is is_refused


def test_the_time_in_which_headers_were_not_read_counts():
    state = overloaded(5.0)
    refuse = refusal_of(state)
    assert refuse is not None
    assert refuse("/v1/completions", HEADERS, -1e9) is not None


def test_the_allowance_grows_with_late_tokens_and_shrinks_with_early_ones():
    lateness = Lateness()
    first_s = lateness.allowance_s(10.0, 0.0)
    assert first_s == pytest.approx(2.0)
    for _ in range(20):
        lateness.observe(9.0, 10.0)
    assert lateness.allowance_s(10.0, 0.0) > first_s
    for _ in range(2000):
        lateness.observe(9.0, 10.0)
    assert lateness.allowance_s(10.0, 0.0) == pytest.approx(5.0)
    for _ in range(2000):
        lateness.observe(-1.0, 10.0)
    assert lateness.allowance_s(10.0, 0.0) == 0.0


@pytest.mark.parametrize(("limit_s", "unread_s"), [(10.0, 0.5), (2.0, 0.1), (0.5, 0.1)])
def test_where_requests_wait_to_be_read_nothing_is_accepted_until_they_do_not(limit_s: float, unread_s: float):
    lateness = Lateness()
    for _ in range(200):
        lateness.observe_unread(unread_s)
    assert lateness.allowance_s(limit_s, 2 * unread_s) > limit_s
    assert lateness.allowance_s(limit_s, unread_s / 4) < limit_s
    assert lateness.allowance_s(limit_s, 0.0) == Lateness().allowance_s(limit_s, 0.0)  # it was read at once
    for _ in range(200):
        lateness.observe_unread(0.0)
    assert lateness.unread_s == 0.0
