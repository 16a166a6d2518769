"""Levels of a command line that hold everything a script has to quote."""

from __future__ import annotations

import pytest

from llmstack_command.completion.tree import Flag, Level


@pytest.fixture
def levels() -> list[Level]:
    """`run` with flags of each kind and a positional, `group` with a subcommand."""
    return [
        Level(
            ("run",),
            "run it: it's [quick]",
            (
                Flag(("--dtype",), "type of $(numbers)", ("float16", "float32"), has_value=True),
                Flag(("-o", "--output-file"), "where it's written: [here]", has_value=True, is_file=True),
                Flag(("--port",), "a `number`", has_value=True),
                Flag(("--eager", "--no-eager"), "no graphs"),
            ),
            has_positional=True,
        ),
        Level(("group",), "things", (), ("inner", "other")),
        Level(("group", "inner"), "one thing", (Flag(("--depth",), "", ("1", "2"), has_value=True),)),
        Level(("group", "other"), "another", ()),
    ]
