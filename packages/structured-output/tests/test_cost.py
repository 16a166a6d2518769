"""Estimates of what constraints cost, before they are compiled."""

from __future__ import annotations

import json

from llmstack_structured_output import normal_form
from llmstack_structured_output.checking.checker import QUICK_S
from llmstack_structured_output.cost import expected_seconds
from llmstack_types import StructuredOutputsParams


def seconds(**constraint: object) -> float:
    return expected_seconds(normal_form(StructuredOutputsParams(**constraint)))  # type: ignore[arg-type]


def test_everyday_constraints_are_cheap() -> None:
    properties = {f"p{n}": {"type": "string", "maxLength": 20, "pattern": "[a-z]{1,20}"} for n in range(100)}
    assert seconds(json={"type": "object", "properties": properties}) < QUICK_S
    assert seconds(json_object=True) < QUICK_S
    assert seconds(regex=r"\d{3}-[a-z]+@[a-z]{2,10}") < QUICK_S
    assert seconds(choice=[f"choice {n}" for n in range(1000)]) < QUICK_S
    assert seconds(grammar='start: "a" | "b" start') < QUICK_S
    assert seconds(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}}) < QUICK_S


def test_intersections_of_many_patterns_are_expensive() -> None:
    slow = {"allOf": [{"pattern": f"(a|b){{{n},}}[^c]*{n}.*"} for n in range(300, 400)]}
    assert seconds(json=slow) > QUICK_S
    assert seconds(json={"properties": {"deep": {"items": slow}}}) > QUICK_S
    assert seconds(json=json.dumps(slow)) > QUICK_S
    assert seconds(grammar="start: A\nA: " + " & ".join("/x{9}/" for _ in range(50))) > QUICK_S


def test_malformed_constraints_are_cheap_for_they_are_refused_when_read() -> None:
    assert seconds(json="{") < QUICK_S
    assert seconds(json="[" * 20_000) < QUICK_S
    assert seconds(regex="a{99999999}{x}{") < QUICK_S
    assert seconds(json={"allOf": 3, "pattern": 4}) < QUICK_S
