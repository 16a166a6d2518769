"""Whatever stands in a field, Responses and Messages answer or refuse, and never run into an error of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.anthropic.protocol import KNOWN, MessagesRequest
from llmstack_server.apis.responses.protocol import UNSUPPORTED, ResponseRequest
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state

ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
TYPES = st.sampled_from(
    ["message", "text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "function", "custom",
     "function_call", "function_call_output", "reasoning", "item_reference", "json_schema", "auto", "any", "image"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-1, 3) | st.text("ab{}\x00é", max_size=4) | TYPES
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "input", "schema",
     "tool_use_id", "input_schema", "parameters", "format", "effort", "thinking", "mode", "tools", "function"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES | ROLES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


def new_app() -> Any:
    return build_app(ready_state(FakeEngineClient(), chat_template="<tool_call></think>"))


# One for each test: an application belongs to the event loop it is first used in.
responses_app = pytest.fixture(scope="module")(new_app)
messages_app = pytest.fixture(scope="module")(new_app)


def bodies(fields: list[str], **base: Any) -> st.SearchStrategy[dict[str, Any]]:
    """`base` with anything in up to three fields."""
    changes = st.dictionaries(st.sampled_from(fields), VALUES, min_size=1, max_size=3)
    return changes.map(lambda change: base | change)


RESPONSES = bodies(sorted({*ResponseRequest.model_fields, *UNSUPPORTED}), input="Hi", max_output_tokens=3)
MESSAGES = bodies(
    sorted({*MessagesRequest.model_fields, *KNOWN}), messages=[{"role": "user", "content": "Hi"}], max_tokens=3
)


@given(RESPONSES)
async def test_responses_answer_or_refuse(responses_app: Any, body: dict[str, Any]):
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        answer = await call(responses_app, "POST", path, body)
        assert answer.status in (200, 400, 404), answer.body
        assert answer.status == 200 or answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", [[], {}, 3, None])
async def test_a_tool_choice_of_no_type_is_refused(messages_app: Any, kind: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = await call(messages_app, "POST", "/v1/messages", body | {"tool_choice": {"type": kind}})
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@given(MESSAGES)
async def test_messages_answer_or_refuse(messages_app: Any, body: dict[str, Any]):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await call(messages_app, "POST", path, body)
        assert answer.status in (200, 400, 404), answer.body
        assert answer.status == 200 or answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
