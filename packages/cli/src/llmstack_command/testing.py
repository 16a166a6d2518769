"""Test support for packages that provide a subcommand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def installed_commands(folder: Path, commands: Mapping[str, str]) -> Iterator[None]:
    """Registers `commands` (name to `module:attribute`) as the entry points of an installed distribution.

    Args:
        folder: An empty folder for the distribution's metadata; modules that the targets name can be put here too.
        commands: Entry points of the group `llmstack.commands`.
    """
    metadata = folder / "third_party_commands-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-commands\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in commands.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[llmstack.commands]", *lines, ""]))
    with mock.patch("sys.path", [str(folder), *sys.path]):
        yield
