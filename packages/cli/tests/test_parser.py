"""Flags: their two spellings and their nearest neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_command.parser import CommandParser, did_you_mean, normalise_flags


@given(st.lists(st.text(alphabet="ab_-=x", max_size=8)))
def test_only_flag_names_change_and_only_their_underscores(line: list[str]):
    normalised = normalise_flags(line)
    assert [word.replace("_", "-") for word in normalised] == [word.replace("_", "-") for word in line]
    assert all(new == old for new, old in zip(normalised, line, strict=True) if not old.startswith("--"))
    assert normalise_flags(normalised) == normalised


def test_values_and_what_follows_a_double_dash_keep_their_underscores():
    line = ["--a_b=c_d", "e_f", "--", "--g_h"]
    assert normalise_flags(line) == ["--a-b=c_d", "e_f", "--", "--g_h"]


def test_a_negative_number_is_a_value():
    parser = CommandParser(prog="x", description="y")
    parser.add_argument("--seed", type=int)
    assert parser.parse_line(["--seed", "-1"]).seed == -1


@pytest.mark.parametrize(("word", "expected"), [("--prot", "; did you mean '--port'?"), ("--qqq", "")])
def test_a_near_miss_names_its_neighbour(word: str, expected: str):
    assert did_you_mean(word, ["--port", "--host"]) == expected
