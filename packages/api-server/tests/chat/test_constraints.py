"""Constraints after reasoning: schemas in strings are decoded up to the compiler's limit, and what else is kept."""

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


def reasoned(**constraint: Any) -> tuple[dict[str, Any], StructuredOutputsParams]:
    """The part of the tag that follows the reasoning, and the whole constraint."""
    later = after_reasoning(StructuredOutputsParams(**constraint), PLAN)
    assert later is not None
    return json.loads(str(later.structural_tag))["format"]["elements"][-1], later


def test_the_options_of_a_constraint_hold_after_the_reasoning():
    options = {"disable_any_whitespace": True, "whitespace_pattern": " ", "disable_additional_properties": False}
    body, later = reasoned(json={"type": "object"}, **options)
    assert body == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert later == StructuredOutputsParams(structural_tag=later.structural_tag, **options)


def test_strings_to_choose_from_stay_texts_after_the_reasoning():
    body, _ = reasoned(choice=["<think>", *map(str, range(300))])
    assert body == {"type": "choice", "choices": ["<think>", *map(str, range(300))]}
