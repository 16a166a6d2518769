"""Installs the workspace members, in editable form, whose metadata is missing or changed.

Entry points and scripts live in the metadata of an editable installation; without this a new subcommand or model runner
would stay invisible until `.venv` is deleted. (Hatch itself only notices changed requirements.) All wheels are built in
this one process: pip would start several for each package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def project_name(project_file: Path) -> str:
    """The name of the distribution."""
    return str(tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]["name"])


def metadata_file(name: str) -> Path | None:
    """The installed METADATA, if any."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return None
    record = next((file for file in files if file.name == "METADATA"), None)
    return None if record is None else Path(str(record.locate()))


def is_stale(project_file: Path) -> bool:
    """Whether the installed metadata is missing or older than `project_file`."""
    installed = metadata_file(project_name(project_file))
    return installed is None or installed.stat().st_mtime < project_file.stat().st_mtime


def install(project_files: list[Path]) -> int:
    """Builds the editable wheels, installs them, and records where they come from, as PEP 610 says."""
    from hatchling.builders.wheel import WheelBuilder

    os.environ["LLMSTACK_BUILD_NATIVE"] = "no"  # the set-up compiles them beside this
    with tempfile.TemporaryDirectory() as folder:
        wheels = [
            path
            for file in project_files
            for path in WheelBuilder(str(file.parent)).build(directory=folder, versions=["editable"])
        ]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
        status = subprocess.run([*command, "--force-reinstall", *wheels], check=False).returncode
    for file in project_files if status == 0 else []:
        installed = metadata_file(project_name(file))
        if installed is not None:
            origin = {"url": file.parent.as_uri(), "dir_info": {"editable": True}}
            installed.with_name("direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
            os.utime(installed)
    return status


def main() -> int:
    stale = [file for file in sorted(ROOT.glob("packages/*/pyproject.toml")) if is_stale(file)]
    if not stale:
        return 0
    print("installing", ", ".join(file.parent.name for file in stale))
    return install(stale)


if __name__ == "__main__":
    sys.exit(main())
