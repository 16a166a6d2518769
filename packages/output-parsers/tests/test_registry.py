"""How parsers are found by name."""

from __future__ import annotations

import pytest

from llmstack_output_parsers import (
    TOOL_PARSERS,
    HermesToolParser,
    ThinkParser,
    UnknownParserError,
    reasoning_parser,
    tool_parser,
)


class EntryPoint:
    name = "mine"

    def load(self) -> type[HermesToolParser]:
        return HermesToolParser


def test_ours_have_the_names_that_people_know():
    for name in ("hermes", "llama3_json", "mistral", "pythonic", "qwen3", "qwen3_coder", "qwen3_xml"):
        assert tool_parser(name)({}).finish().content == ""
    for name in ("deepseek_r1", "mistral", "qwen3", "think"):
        assert reasoning_parser(name)(is_open=None).finish().content == ""


def test_those_of_installed_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint()])
    assert tool_parser("mine") is HermesToolParser
    with pytest.raises(UnknownParserError, match=r"no parser 'minee'; did you mean mine"):
        tool_parser("minee")


def test_a_module_and_class_is_one_more_under_any_name():
    plugin = "llmstack_output_parsers.reasoning:ThinkParser"
    assert reasoning_parser("anything", plugin) is ThinkParser
    assert tool_parser("hermes", plugin) is HermesToolParser


def test_a_wrong_name_is_refused_in_one_line_with_the_nearest_names():
    with pytest.raises(UnknownParserError, match=r"^there is no parser 'hermes2'; did you mean hermes\?$"):
        tool_parser("hermes2")
    with pytest.raises(UnknownParserError, match=r"^there is no parser '###'; the README of \S+ lists all \d+$"):
        tool_parser("###")


def test_strict_tags_are_the_text_around_a_call_of_that_parser() -> None:
    tagged = {name: make.strict_tags for name, make in TOOL_PARSERS.items() if getattr(make, "strict_tags", None)}
    assert set(tagged) == {"ernie45", "granite4", "hermes", "qwen3"}
    for name, (begin, end) in tagged.items():
        parser = TOOL_PARSERS[name]({"f": {"type": "object"}})
        deltas = [parser.feed(f'{begin}{{"name": "f", "arguments": {{}}}}{end}'), parser.finish()]
        assert [call.name for delta in deltas for call in delta.tool_calls] == ["f"]
        assert "".join(delta.content for delta in deltas) == ""
