"""Helpers for the tests of packages that provide a subcommand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def installed_commands(folder: Path, commands: Mapping[str, str]) -> Iterator[None]:
    """Makes `commands` (name to `module:attribute`) look like the entry points of one installed distribution.

    Args:
        folder: An empty folder for the distribution's metadata; put modules the targets name here too.
        commands: Entry points of the group `llmstack.commands`.
    """
    metadata = folder / "third_party_commands-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-commands\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in commands.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[llmstack.commands]", *lines, ""]))
    with mock.patch("sys.path", [str(folder), *sys.path]):
        yield
