"""Calls that the end of the text has cut, in every format: they can be decoded, and leave no token in the content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers import TOOL_PARSERS, NamedCallParser, RequiredCallsParser
from llmstack_output_parsers.example_calls import EXAMPLE_CALLS, TOOLS
from llmstack_output_parsers.json_writer import JsonWriter
from llmstack_output_parsers.testing import check_calls, check_output_parser

cities = st.text(st.sampled_from('ab "\\\n</>{}[]|é'), max_size=12).map("x{}y".format)
FORMS_AT_THE_START = ("llama3_json", "llama4_json", "llama4_pythonic", "pythonic", "xlam")


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_a_call_may_be_cut_at_any_place(form: str):
    before = "" if form in FORMS_AT_THE_START else "Well. "
    text = before + EXAMPLE_CALLS[form]('Ro "<b>"\nme')
    for end in range(len(text) + 1):
        found = check_calls(lambda: TOOL_PARSERS[form](TOOLS), text[:end])
        assert len(found.calls) <= 1
        assert all(name == "get_weather" for name, _ in found.calls)
        if before and end > len(before) + 30:  # longer than a marker, of which a part alone may be text
            assert found.content == before


@given(form=st.sampled_from(sorted(TOOL_PARSERS)), city=cities, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_cut_call_is_the_same_streamed_and_whole(form: str, city: str, data: st.DataObject):
    text = f"{EXAMPLE_CALLS[form](city)}\n{EXAMPLE_CALLS[form](city)}"
    cut_text = text[: data.draw(st.integers(0, len(text)))]
    check_calls(lambda: TOOL_PARSERS[form](TOOLS), cut_text, data.draw(st.lists(st.integers(0, 300), max_size=8)))


@given(city=cities, end=st.integers(0, 80), places=st.lists(st.integers(0, 80), max_size=6))
@settings(deadline=None)
def test_a_forced_call_may_be_cut_at_any_place(city: str, end: int, places: list[int]):
    arguments = json.dumps({"city": city, "places": [1, {"a": None}, "b"]})
    named = check_output_parser(lambda: NamedCallParser("now"), arguments[:end], places)
    array = f'[{{"name": "now", "parameters": {arguments}}}]'
    required = check_output_parser(RequiredCallsParser, array[:end], places)
    for found in (named, required):
        assert found.content == ""
        assert all(isinstance(json.loads(text), dict) for _, text in found.calls)
    assert len(named.calls) == (1 if end else 0)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), cities),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(cities, inner, max_size=3),
)


@given(
    value=st.dictionaries(cities, json_values, max_size=4), end=st.integers(0, 200), indent=st.sampled_from([None, 1])
)
def test_an_object_can_be_closed_at_any_place(value: dict[str, object], end: int, indent: int | None):
    text = json.dumps(value, indent=indent)
    writer = JsonWriter()
    end = min(end, len(text))
    assert writer.scan(text, 0, end) == end
    assert not writer.is_broken
    assert writer.is_complete == (end == len(text))
    writer.close()
    written = writer.take()
    assert list(json.loads(written)) == list(value)[: len(json.loads(written))]
    if end == len(text):
        assert written == text


@given(text=st.text(st.sampled_from("{}[]\",:\\ \n1-e.truefalsnuN\x00u'abé"), max_size=30), place=st.integers(0, 30))
def test_any_text_is_written_as_an_object(text: str, place: int):
    whole, pieces = JsonWriter(), JsonWriter()
    end = whole.scan(text, 0, len(text))
    for piece in (text[:place], text[place:]):
        if not pieces.is_broken:
            pieces.scan(piece, 0, len(piece))
    for writer in (whole, pieces):
        writer.close()
    written = whole.take()
    assert isinstance(json.loads(written), dict)
    assert written == pieces.take()
    assert 0 <= end <= len(text)
