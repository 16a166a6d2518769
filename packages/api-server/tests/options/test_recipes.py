"""Published `vllm serve` lines: what stands in the way of each is listed line by line."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from llmstack_command.errors import CommandLineError
from llmstack_command.parser import CommandParser
from llmstack_server.commands import ServeCommand
from llmstack_server.commands.dry_run import dry_run
from llmstack_server.options.command_line import settings_from

ROOT = Path(__file__).resolve().parents[4]
RECIPES = next(
    (folder / "shared/data/recipes.txt" for folder in (ROOT, ROOT.parent) if (folder / "shared/data").is_dir()), None
)
OUTCOMES = Path(__file__).with_name("recipe_outcomes.json")
"""Number of a line, from 1, to the flags and values that stand in its way; lines without any are left out."""
ASSUMED = ("--dry-run", "--assume-devices", "8x80GiB", "--assume-model")

# What a sentence is about, by the flag that it begins with. Draft models, and formats of other engines' plug-ins, leave
# the denominator. Devices, files, models and formats of files that are not there are true reasons. Everything else is a
# flag that stands in the way.
DRAFTS = ("--speculative-config",)
DEVICES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel")
FILES = ("--chat-template", "--config", "--logits-processors")
FORMATS = ("--tokenizer-mode", "--config-format", "--load-format", "--quantization")
STATE_SPACE = ("--mamba-ssm-cache-dtype",)
PLUGINS = ("nano_v3", "minicpm5")
NO_OBSTACLE = (*DEVICES, *FILES, *FORMATS, *STATE_SPACE)
SHARE = 0.95

pytestmark = pytest.mark.skipif(RECIPES is None, reason="shared/data/recipes.txt is not beside the repository")


def found_problems(parser: CommandParser, line: str) -> list[str]:
    problems: list[str] = []

    def check(namespace: object) -> list[str]:
        return list(dry_run(settings_from(namespace, {})).problems)  # type: ignore[arg-type]

    try:
        parser.parse_line([*shlex.split(line), *ASSUMED], check)
    except CommandLineError as error:
        problems = str(error).splitlines()
    return problems


def flag_of(problem: str) -> str:
    return problem.split()[0].rstrip(":")


def outcome_of(problems: list[str]) -> list[str]:
    """The flags at fault, with the name of a parser or a method."""
    named: list[str] = []
    for problem in problems:
        flag = flag_of(problem)
        quoted = problem.split("'")[1] if "'" in problem else ""
        named.append(f"{flag} {quoted}".strip() if flag.endswith(("-parser", "-plugin", "-config")) else flag)
    return sorted(named)


def leaves_denominator(outcome: list[str]) -> bool:
    return any(flag_of(name) in DRAFTS or any(plugin in name for plugin in PLUGINS) for name in outcome)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    assert RECIPES is not None
    parser = CommandParser(prog="llmstack serve", description="")
    ServeCommand().add_arguments(parser)
    return {
        str(number): outcome_of(found_problems(parser, line))
        for number, line in enumerate(RECIPES.read_text(encoding="utf-8").splitlines(), 1)
    }


def test_what_became_of_every_line_is_the_committed_table(outcomes: dict[str, list[str]]):
    found = {number: names for number, names in outcomes.items() if names}
    if os.environ.get("UPDATE_RECIPE_OUTCOMES"):
        rows = ",\n".join(f'"{number}": {json.dumps(names)}' for number, names in found.items())
        OUTCOMES.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    assert found == json.loads(OUTCOMES.read_text(encoding="utf-8"))


def test_for_nearly_all_lines_no_flag_is_the_obstacle(outcomes: dict[str, list[str]]):
    counted = {number: names for number, names in outcomes.items() if not leaves_denominator(names)}
    obstructed = {
        number: names for number, names in counted.items() if any(flag_of(name) not in NO_OBSTACLE for name in names)
    }
    assert len(outcomes) == 214
    assert len(counted) > 170
    assert len(obstructed) <= (1 - SHARE) * len(counted), obstructed
