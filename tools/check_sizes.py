"""Source files and functions that are too long, and packages with too many fragments."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MIN_SOURCE_LINES = 40
# A module is a thing with a name: at most a tenth of all have fewer lines than that, and of those of these packages.
FEW_FRAGMENTS = ("*", "api-server", "llm", "model-runner")
SOURCES = ("packages/*/src/**/*.py", "packages/*/train/**/*.py", "tools/*.py")
TESTS = ("packages/*/tests/**/*.py", "packages/*/benchmarks/**/*.py", "benchmarks/**/*.py", "integration-tests/**/*.py")


def function_complaints(path: Path, text: str) -> Iterator[str]:
    """One line per function longer than the limit, its docstring and decorators not counted."""
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield f"{where}: {node.name} has {num_lines} lines, {MAX_FUNCTION_LINES} at most"


def file_complaints(path: Path, text: str) -> Iterator[str]:
    """One line if the file is longer than the limit."""
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{path.relative_to(ROOT)}:1: {num_lines} lines, {MAX_FILE_LINES} at most"


def fragment_complaints(package: str) -> Iterator[str]:
    """One line if more than a tenth of a package's modules are shorter than `MIN_SOURCE_LINES`; `*` is all packages."""
    paths = [path for path in ROOT.glob(f"packages/{package}/src/**/*.py") if path.name != "__init__.py"]
    short = [path for path in paths if path.read_text(encoding="utf-8").count("\n") < MIN_SOURCE_LINES]
    if 10 * len(short) > len(paths):
        names = ", ".join(sorted(path.name for path in short))
        yield f"packages/{package}: {len(short)} of {len(paths)} modules have under {MIN_SOURCE_LINES} lines: {names}"


def complaints() -> Iterator[str]:
    for package in FEW_FRAGMENTS:
        yield from fragment_complaints(package)
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        yield from file_complaints(path, text)
        yield from function_complaints(path, text)
    for path in sorted(path for pattern in TESTS for path in ROOT.glob(pattern)):
        yield from file_complaints(path, path.read_text(encoding="utf-8"))


def main() -> int:
    found = list(complaints())
    print("\n".join(found) if found else "sizes: every file and function reads in one sitting")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
