"""Flags: their two spellings and their nearest neighbours."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_command.errors import CommandLineError
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


def test_flags_that_stand_for_others_and_switches_with_values_are_respelt():
    parser = CommandParser(prog="x", description="y")
    parser.add_argument("--config")
    parser.add_argument("--fast", "--no-fast", action="store_true", dest="fast")
    parser.add_argument("--only", action="store_true")
    parser.add_argument("--colour").stands_for = "--config.colour"  # type: ignore[attr-defined]
    words = [
        "--colour",
        "red",
        "--fast=False",
        "--fast",
        "TRUE",
        "--only=true",
        "--config",
        "true",
        "--",
        "--fast=true",
    ]
    assert parser._respelt(words) == [
        "--config.colour", "red", "--no-fast", "--fast", "--only=true", "--config", "true", "--", "--fast=true"
    ]  # fmt: skip
    assert parser._respelt(["--colour=red", "true"]) == ["--config.colour=red", "true"]


def check(namespace: argparse.Namespace) -> list[str]:
    return [f"--size: {namespace.size} is odd"] if namespace.size == "3" else []


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        (["--size", "4", "--seed", "1"], []),
        (["--size", "3"], ["--size: 3 is odd"]),
        (["--size", "3", "--seed", "x"], ["--seed: invalid int value: 'x'", "--size: 3 is odd"]),
        (["--seed", "--sise", "4"], ["--seed: expected one argument", "unknown flag '--sise'; did you mean '--size'?"]),
        (
            ["--no", "--size", "3", "--other=1"],
            ["unknown flag '--no'; see x --help", "unknown flag '--other'; did you mean '--help'?", "--size: 3 is odd"],
        ),
        (
            ["--size", "3", "left", "over"],
            ["unexpected argument 'left'", "unexpected argument 'over'", "--size: 3 is odd"],
        ),
        (["--fast=True", "--size", "4"], ["--fast: it takes no value"]),
        (["--", "--size", "4"], ["unexpected argument '--size': nothing behind '--' is a flag"]),
    ],
)
def test_all_that_is_wrong_is_reported_together(line: list[str], problems: list[str]):
    parser = CommandParser(prog="x", description="y")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--size")
    parser.add_argument("--fast", action="store_true")
    if not problems:
        assert parser.parse_line(line, check).size == "4"
        return
    with pytest.raises(CommandLineError) as caught:
        parser.parse_line(line, check)
    assert str(caught.value).splitlines() == problems


def test_help_about_a_group_a_flag_or_all(capsys: pytest.CaptureFixture[str]):
    parser = CommandParser(prog="llmstack tea", description="brews")
    group = parser.add_argument_group("Hot water")
    group.add_argument("--degrees", help="how hot")
    hidden = parser.add_argument("--kettle-backend", help=argparse.SUPPRESS)
    hidden.reason = "there is one kettle"  # type: ignore[attr-defined]
    for line, present, absent in (
        ("--help=hot-water", "how hot", "--help"),
        ("--help=--degrees", "how hot", "Hot water"),
        ("--help=kettle", "--kettle-backend: there is one kettle", "how hot"),
        ("--bogus --help=all", "brews", "kettle"),
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_line(line.split())
        written = capsys.readouterr().out
        assert (caught.value.code, present in written, absent in written) == (0, True, False), line
    with pytest.raises(CommandLineError, match="no flag or group is named 'milk'; groups are Hot water"):
        parser.parse_line(["--help=milk"])
    assert parser.parse_line(["--degrees=--help=x"]).degrees == "--help=x"


def test_a_check_may_choose_the_exit_code():
    parser = CommandParser(prog="llmstack tea", description="")

    def check(namespace: argparse.Namespace) -> list[str]:
        namespace.exit_code = 1
        return ["no water"]

    with pytest.raises(CommandLineError, match="no water") as caught:
        parser.parse_line([], check)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--tensor-parallel=4", "--tensor-parallel-size=4"),
        ("--ten", "--tensor-parallel-size"),
        ("--te", "--te"),  # as short as a typing error
        ("--max", "--max"),  # of two
        ("--max-model-len", "--max-model-len"),  # and the beginning of another
        ("--fas", "--fast"),
        ("--no-f=true", "--no-fast"),
        ("-ten", "-ten"),
    ],
)
def test_what_only_one_flag_begins_with_is_that_flag(word: str, expected: str):
    parser = CommandParser(prog="x", description="y")
    for flags in (("--tensor-parallel-size", "-t"), ("--max-model-len",), ("--max-model-lens",)):
        parser.add_argument(*flags)
    parser.add_argument("--fast", "--fast-too", "--no-fast", action="store_true", dest="fast")
    assert parser._respelt([word]) == [expected]


def test_an_abbreviation_that_could_be_two_flags_is_unknown():
    parser = CommandParser(prog="x", description="y")
    parser.add_argument("--max-model-len")
    parser.add_argument("--max-num-seqs")
    with pytest.raises(CommandLineError, match="unknown flag '--max'"):
        parser.parse_line(["--max", "3"])
    assert parser.parse_line(["--max_num", "3"]).max_num_seqs == "3"
