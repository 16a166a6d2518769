"""Flags that a page of the docs names are those of a command, and a request of curl names the type of its body."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from llmstack_command.completion.tree import describe_commands
from llmstack_command.discovery import find_commands
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, KEY_FLAGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
# Pages on other servers and on scripts have flags of those.
OF_OTHERS = ("bench.md", "benchmark-history.md", "kernels.md")
OF_OTHERS += tuple(page.name for page in PAGES if page.name.startswith("benchmarks"))
# Flags of scripts of this repository, of pip and of torchrun, and what stands for any flag.
OTHERS = {
    "--find-links", "--flag", "--no", "--no-flag", "--nproc-per-node", "--sample", "--short", "--small", "--start",
    "--work",
}  # fmt: skip


@cache
def known_flags() -> frozenset[str]:
    levels = describe_commands(find_commands())
    own = frozenset(name for level in levels for flag in level.flags for name in flag.names)
    return own | set(ALL_FOREIGN_FLAGS) | set(KEY_FLAGS)


def flags_of(text: str) -> set[str]:
    """Flags at the start of inline code, and in the lines of a block that run `llmstack`."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`(--[a-z][a-z0-9_-]*)", prose)
    lines = re.findall(r"^\s*(llmstack [a-z-]+ .*?)(?:\s#.*)?$", text, re.MULTILINE)
    # A line that is quoted for `--translate` is one of another engine.
    words = [word for line in lines if "--translate" not in line for word in line.split()]
    return {*inline, *re.findall(r"(?<!\S)--[a-z][a-z0-9_-]*", " ".join(words))}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in OF_OTHERS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_each_flag_of_a_page_is_one_of_a_command(page: Path) -> None:
    found = {flag.rstrip("-").replace("_", "-") for flag in flags_of(page.read_text(encoding="utf-8"))}
    assert sorted(found - known_flags() - OTHERS) == []


def test_flags_are_found_in_prose_and_in_commands() -> None:
    assert flags_of("set `--one 1`\n\n```\nllmstack serve --two --three-x 3  # --four\ngit --five\n```\n") == {
        "--one", "--two", "--three-x",
    }  # fmt: skip


def requests_with_a_body(text: str) -> list[str]:
    """The commands of curl that send data, each with its continued lines."""
    commands = re.findall(r"^\s*(curl (?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [command for command in commands if re.search(r"\s(-d|--data)\s", command)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_request_of_curl_says_that_its_body_is_json(page: Path) -> None:
    commands = requests_with_a_body(page.read_text(encoding="utf-8"))
    assert [one for one in commands if "content-type: application/json" not in one.lower()] == []


def test_requests_with_a_body_are_found() -> None:
    assert len(requests_with_a_body((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))) >= 4
