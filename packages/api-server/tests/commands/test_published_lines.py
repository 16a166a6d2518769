"""Lines of documentation and model cards of vLLM, SGLang and llama.cpp: what stands in the way of each."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from llmstack_command.errors import CommandLineError
from llmstack_command.parser import CommandParser
from llmstack_server.commands import ServeCommand
from llmstack_server.commands.dry_run import dry_run
from llmstack_server.commands.shell_line import VARIABLE
from llmstack_server.commands.translate import translate
from llmstack_server.options.command_line import settings_from

LINES = Path(__file__).with_name("published_lines.txt").read_text(encoding="utf-8").splitlines()
OUTCOMES = Path(__file__).with_name("published_outcomes.json")
"""Number of a line, from 1, to the flags that stand in its way; lines without any are left out."""
ASSUMED = ("--dry-run", "--assume-devices", "8x80GiB", "--assume-model")


@pytest.fixture(scope="module")
def parser() -> CommandParser:
    made = CommandParser(prog="llmstack serve", description="")
    ServeCommand().add_arguments(made)
    return made


def problems_of(parser: CommandParser, words: Iterable[str]) -> list[str]:
    def check(namespace: object) -> list[str]:
        return list(dry_run(settings_from(namespace, {})).problems)  # type: ignore[arg-type]

    try:
        parser.parse_line([*words, *ASSUMED], check)
    except CommandLineError as error:
        return str(error).splitlines()
    return []


def flags_of(sentences: Iterable[str]) -> list[str]:
    return sorted({sentence.split()[0].rstrip(":") for sentence in sentences})


def test_what_became_of_every_line_is_the_committed_table(parser: CommandParser):
    found: dict[str, list[str]] = {}
    for number, line in enumerate(LINES, 1):
        translated = translate(line)
        is_plain = line.startswith("vllm serve ")
        words = shlex.split(line)[2:] if is_plain else [word.replace(VARIABLE, "$") for word in translated.words]
        problems = problems_of(parser, words)
        if flags := flags_of([*problems, *translated.missing]):
            found[str(number)] = flags
    if os.environ.get("UPDATE_RECIPE_OUTCOMES"):
        rows = ",\n".join(f'"{number}": {json.dumps(names)}' for number, names in found.items())
        OUTCOMES.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    assert found == json.loads(OUTCOMES.read_text(encoding="utf-8"))


def test_no_flag_of_these_lines_is_unknown(parser: CommandParser):
    sentences = [
        sentence
        for line in LINES
        for sentence in (
            *translate(line).missing,
            *problems_of(parser, shlex.split(line)[2:] if line.startswith("vllm serve ") else []),
        )
    ]
    assert [
        sentence for sentence in sentences if "unknown flag" in sentence or "is known to correspond" in sentence
    ] == []
