"""The commands that need no other package."""

from __future__ import annotations

import argparse

import pytest

from llmstack_command.builtin import VersionsCommand, command_version


def test_versions_ends_with_the_interpreter(capsys: pytest.CaptureFixture[str]):
    assert VersionsCommand().run(argparse.Namespace()) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("python 3.")


def test_a_version_is_named_even_when_running_from_source():
    assert command_version()
