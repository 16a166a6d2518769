"""Where commands come from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from llmstack_command import discovery
from llmstack_command.discovery import CommandSource, find_command, find_commands
from llmstack_command.errors import CommandLineError
from llmstack_command.testing import installed_commands


def test_a_command_of_a_package_is_found_where_the_package_is_on_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "OF_PACKAGES", {"demo": "json:loads", "gone": "no_such_package:Command"})
    assert find_commands()["demo"] == CommandSource("demo", "json:loads")
    assert "gone" not in find_commands()


@pytest.mark.parametrize("name", ["versions", "demo"])
def test_a_command_of_the_project_cannot_be_replaced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "OF_PACKAGES", {"demo": "json:loads"})
    with installed_commands(tmp_path, {name: "third_party:Other"}):
        assert find_commands()[name] == find_command(name)
        assert find_command(name).target != "third_party:Other"


def test_a_command_of_the_project_is_found_without_reading_distributions(monkeypatch: pytest.MonkeyPatch):
    def fail(group: str) -> None:
        raise AssertionError(f"the entry points of {group} were read")

    monkeypatch.setattr(discovery, "find_entry_points", fail)
    assert find_command("serve") == CommandSource("serve", discovery.OF_PACKAGES["serve"])
    assert find_command("greet") is None


def test_the_commands_of_packages_are_those_of_their_entry_points():
    declared = {}
    for project in Path(__file__).parents[2].glob("*/pyproject.toml"):
        content = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        declared |= content.get("entry-points", {}).get(discovery.GROUP, {})
    if not declared:
        pytest.skip("needs the other packages beside this one")
    assert declared == discovery.OF_PACKAGES


def test_names_come_sorted():
    assert list(find_commands()) == sorted(find_commands())


def test_a_missing_attribute_is_named():
    with pytest.raises(CommandLineError, match="no_such_attribute"):
        CommandSource("demo", "json:no_such_attribute").load()
