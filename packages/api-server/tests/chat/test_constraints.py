"""Constraints after reasoning: schemas in strings are decoded up to the compiler's limit."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llmstack_output_parsers import ThinkParser
from llmstack_server.chat import constraints
from llmstack_server.chat.constraints import after_reasoning
from llmstack_server.chat.reading import ReasoningPlan
from llmstack_structured_output import GrammarLimits
from llmstack_types import StructuredOutputsParams

PLAN = ReasoningPlan(ThinkParser, None, True, None, len)
MAX_BYTES = GrammarLimits().max_schema_bytes


@pytest.mark.parametrize(("num_chars", "num_decoded"), [(MAX_BYTES, 1), (MAX_BYTES + 1, 0), (4 << 20, 0)])
def test_a_schema_that_the_compiler_refuses_for_its_size_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch, num_chars: int, num_decoded: int
):
    decoded: list[str] = []

    def loads(text: str) -> Any:
        decoded.append(text)
        return json.loads(text)

    monkeypatch.setattr(constraints, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    schema = '{"type": "object"}'.ljust(num_chars)
    later = after_reasoning(StructuredOutputsParams(json=schema), PLAN)
    assert len(decoded) == num_decoded
    assert (later is not None) == bool(num_decoded)
