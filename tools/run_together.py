"""Runs scripts of pyproject.toml beside one another, one per processor, and prints what each said at its end.

    python tools/run_together.py types lint prose     the names are those of [tool.hatch.envs.default.scripts]

All of them run, also behind one that fails; the exit code is 1 if one failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Scripts = dict[str, str | list[str]]


def commands(scripts: Scripts, line: str) -> Iterator[str]:
    """The shell commands of one line: those of the script that its first word names, with the rest as arguments."""
    name, _, rest = line.partition(" ")
    if name not in scripts:
        yield line
        return
    found = scripts[name]
    for one in [found] if isinstance(found, str) else found:
        filled = re.sub(r"\{args(?::([^}]*))?\}", lambda match: rest or match[1] or "", one)
        yield from commands(scripts, filled.strip())


def run(lines: list[str]) -> tuple[bool, str]:
    """Whether all commands of one script succeed, and what they print; the first failure ends it."""
    said = []
    for line in lines:
        pipe, stderr = subprocess.PIPE, subprocess.STDOUT
        # The shell is right here: the lines are those of our own pyproject.toml, as hatch gives them to one.
        done = subprocess.run(line, shell=True, cwd=ROOT, text=True, stdout=pipe, stderr=stderr)  # noqa: S602
        said.append(done.stdout)
        if done.returncode:
            return False, "".join([*said, f"{line}: exit code {done.returncode}\n"])
    return True, "".join(said)


def main() -> int:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]["scripts"]
    names, failed, start = sys.argv[1:], [], time.monotonic()
    if unknown := [name for name in names if name not in scripts]:
        sys.exit(f"not a script of pyproject.toml: {', '.join(unknown)}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        running = {pool.submit(run, list(commands(scripts, name))): name for name in names}
        for done in as_completed(running):
            succeeded, text = done.result()
            failed += [] if succeeded else [running[done]]
            verdict = "passed" if succeeded else "FAILED"
            print(f"{running[done]}: {verdict} after {time.monotonic() - start:.0f} s\n{text}", end="", flush=True)
    print(
        f"checks: {len(names) - len(failed)} of {len(names)} passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
