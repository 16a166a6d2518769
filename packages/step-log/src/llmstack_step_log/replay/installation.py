"""Decisions of the packages of another installation, in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_step_log import StepLogError
from llmstack_step_log.replay.derive import Decision

PACKAGES = "llmstack_*"


def derive_with_installation(path: Path, installation: Path, copy: bytes | None = None) -> Iterator[Decision]:
    """The decisions of the packages of another installation.

    Args:
        path: The log.
        copy: The log that the packages read instead; None for the log itself.
        installation: A wheel, a folder of wheels or of unpacked packages, or a checkout with `packages/*/src`.

    Raises:
        StepLogError: There are no packages, or they cannot replay the log; the text says why.
    """
    found = installation_paths(installation)
    if not found:
        raise StepLogError(f"there are no packages of llmstack in {installation}")
    return _run_child(path, found) if copy is None else _run_on_copy(copy, found)


def installation_paths(installation: Path) -> list[str]:
    """The path entries of a process that uses that installation; empty if there is none."""
    if installation.suffix == ".whl":
        return [str(installation.resolve())]
    if any(installation.glob(PACKAGES)):
        wheels = sorted(str(wheel.resolve()) for wheel in installation.glob(f"{PACKAGES}.whl"))
        return wheels or [str(installation.resolve())]
    return sorted(str(folder.resolve()) for folder in installation.glob("packages/*/src"))


def _run_on_copy(copy: bytes, found: list[str]) -> Iterator[Decision]:
    with tempfile.NamedTemporaryFile(suffix=".steps") as file:  # only its owner can read it
        file.write(copy)
        file.flush()
        yield from _run_child(Path(file.name), found)


def _run_child(path: Path, found: list[str]) -> Iterator[Decision]:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmstack_step_log.replay.child", str(path.resolve())],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*found, *(entry or os.getcwd() for entry in sys.path)])},
        )
        try:
            if process.stdout is not None:
                for step, now_us, packed in msgpack.Unpacker(process.stdout):
                    yield Decision(step, now_us, packed)
            if process.wait():
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines() or ["it says nothing"]
                raise StepLogError(f"cannot be replayed by the other installation: {lines[-1][:200]}")
        finally:
            process.kill()  # the first difference is enough
            process.communicate()
