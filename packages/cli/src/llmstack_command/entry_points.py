"""Entry points of one group, read without `importlib.metadata`.

That module imports the standard library's e-mail, archive and network modules, which takes longer than all else before
a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

FILE = "entry_points.txt"


def find_entry_points(group: str, path: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Name and value of each entry point of the group; of a distribution that is on `path` twice, the first counts.

    `path`: Folders to search; those of `sys.path` by default.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in sys.path if path is None else path:
        for distribution, file in _metadata_files(folder or os.curdir):
            if distribution not in found:
                found[distribution] = _read(file, group)
    return [entry for entries in found.values() for entry in entries]


def _metadata_files(folder: str) -> Iterator[tuple[str, str]]:
    """The name of each distribution in a folder, and the path of its entry points, which may not exist."""
    try:
        names = os.listdir(folder)
    except OSError:  # a zip file, or not there
        return
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            # A name is compared in its normal form, and without the version.
            distribution = name.rpartition(".")[0].partition("-")[0]
            yield distribution.lower().replace(".", "_"), os.path.join(folder, name, FILE)


def _read(file: str, group: str) -> list[tuple[str, str]]:
    try:
        with open(file, encoding="utf-8") as lines:
            text = lines.read()
    except (OSError, UnicodeDecodeError):
        return []
    entries, is_inside = [], False
    for line in text.splitlines() if f"[{group}]" in text else ():
        line = line.strip()
        if line.startswith("["):
            is_inside = line == f"[{group}]"
        elif is_inside and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            entries.append((name.strip(), value.partition("[")[0].strip()))
    return entries
