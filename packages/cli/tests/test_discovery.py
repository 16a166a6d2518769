"""Where commands come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_command import discovery
from llmstack_command.discovery import CommandSource, find_commands
from llmstack_command.errors import CommandLineError
from llmstack_command.testing import installed_commands


def test_a_fallback_is_used_where_its_package_is_on_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "FALLBACKS", {"demo": "json:loads", "gone": "no_such_package:Command"})
    assert find_commands()["demo"] == CommandSource("demo", "json:loads")
    assert "gone" not in find_commands()


def test_an_entry_point_beats_the_fallback_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "FALLBACKS", {"demo": "json:loads"})
    with installed_commands(tmp_path, {"demo": "third_party:Demo"}):
        assert find_commands()["demo"].target == "third_party:Demo"


def test_a_built_in_command_cannot_be_replaced(tmp_path: Path):
    with installed_commands(tmp_path, {"versions": "third_party:Versions"}):
        assert find_commands()["versions"].target == discovery.BUILT_IN["versions"]


def test_names_come_sorted():
    assert list(find_commands()) == sorted(find_commands())


def test_a_missing_attribute_is_named():
    with pytest.raises(CommandLineError, match="no_such_attribute"):
        CommandSource("demo", "json:no_such_attribute").load()
