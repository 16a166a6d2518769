"""JSON values given piece by piece."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_command.dotted import fold_dotted_flags
from llmstack_command.errors import CommandLineError


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("--a.b 4", ['--a={"b": 4}']),
        ("--a.b=4 x", ['--a={"b": 4}', "x"]),
        ("--a.b.c text --p 1 --a.d true", ['--a={"b": {"c": "text"}, "d": true}', "--p", "1"]),
        ('--a {"x":1} --a.b -2', ['--a={"x": 1, "b": -2}']),
        ('--a.b 2 --a={"x":1,"b":3}', ['--a={"x": 1, "b": 2}']),
        ("--p a.b -- --a.b 4", ["--p", "a.b", "--", "--a.b", "4"]),
        ("-cc.a.b=True -1.5 x.y", ['-cc={"a": {"b": "True"}}', "-1.5", "x.y"]),
        ("--a.b 4 -- --a.b 5", ['--a={"b": 4}', "--", "--a.b", "5"]),
    ],
)
def test_pieces_become_one_json_object_where_the_first_stood(line: str, folded: list[str]):
    assert fold_dotted_flags(line.split()) == folded


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--a.b", ["--a.b", "expected one argument"]),
        ("--a.b --c", ["--a.b", "expected one argument"]),
        ("--a.b 1 --a.b.c 2", ["--a.b.c", "not a JSON object"]),
        ("--a 1 --a.b 2", ["--a", "not a JSON object"]),
    ],
)
def test_pieces_that_do_not_fit_are_named(line: str, words: list[str]):
    with pytest.raises(CommandLineError) as raised:
        fold_dotted_flags(line.split())
    assert all(word in str(raised.value) for word in words), raised.value


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers() | st.booleans(), min_size=1))
def test_pieces_say_the_same_as_the_object(fields: dict[str, int]):
    line = [word for name, value in fields.items() for word in (f"--flag.{name}", json.dumps(value))]
    (folded,) = fold_dotted_flags(line)
    assert json.loads(folded.removeprefix("--flag=")) == fields
