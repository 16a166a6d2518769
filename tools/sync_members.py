"""Reinstalls the workspace members whose metadata changed, since hatch itself only notices changed requirements.

Entry points and scripts live in the metadata of an editable installation; without this a new subcommand or model runner
would stay invisible until `.venv` is deleted.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def is_stale(project_file: Path) -> bool:
    """Whether the installed metadata is missing or older than `project_file`."""
    name = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]["name"]
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return True
    record = next((file for file in installed.files or [] if file.name == "METADATA"), None)
    return record is None or Path(str(record.locate())).stat().st_mtime < project_file.stat().st_mtime


def main() -> int:
    stale = [file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml")) if is_stale(file)]
    if not stale:
        return 0
    print("reinstalling", ", ".join(folder.name for folder in stale))
    editable = [argument for folder in stale for argument in ("--editable", str(folder))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *editable]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
