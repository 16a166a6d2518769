"""The command `python -m llmstack_kernels.ahead_of_time`.

It compiles kernels without a GPU, prints their table, and fails on findings and on differences from the stored table.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from llmstack_kernels import launch
from llmstack_kernels.ahead_of_time import collect, table
from llmstack_kernels.ahead_of_time.survey import Survey, survey
from llmstack_kernels.ahead_of_time.target import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 without findings, 1 on findings or a table that differs, 2 if nothing can be compiled."""
    options = _parser().parse_args(arguments)
    if complaint := _why_nothing_compiles():
        return _fail(complaint)
    ops = options.op or collect.ops_with_kernels()
    if unknown := set(ops) - set(collect.ops_with_kernels()):
        return _fail(f"no Triton kernels in {', '.join(sorted(unknown))}; there are some in {_known()}.")
    targets = [TARGETS[arch] for arch in options.arch]
    found = survey(ops, targets, samples_only=not (options.all or options.update), say=_log)
    if options.update:
        _update(found, ops, options)
    return _report(found, _differences(found, ops, options))


def _parser() -> argparse.ArgumentParser:
    description = "Compiles the Triton kernels without a GPU, prints their table, and fails on findings."
    parser = argparse.ArgumentParser(prog="python -m llmstack_kernels.ahead_of_time", description=description)
    parser.add_argument("op", nargs="*", help="operations; all of them by default")
    parser.add_argument("--all", action="store_true", help="every configuration, not one sample per kernel")
    parser.add_argument(
        "--arch", nargs="+", type=int, choices=list(TARGETS), default=list(TARGETS), help="90, 100 and 80"
    )
    parser.add_argument("--update", action="store_true", help="compile every configuration and rewrite the table")
    parser.add_argument("--table", type=Path, default=table.PATH, help="the table; that of the repository by default")
    return parser


def _why_nothing_compiles() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (extra `triton`)."
    if launch.is_interpreted():
        return "TRITON_INTERPRET is set, so kernels would be interpreted and not compiled; unset it."
    return None


def _known() -> str:
    return ", ".join(collect.ops_with_kernels())


def _update(found: Survey, ops: Sequence[str], options: argparse.Namespace) -> None:
    import triton

    stored = table.read(options.table).rows if options.table.exists() else ()
    rows = table.updated(stored, found.rows, ops, options.arch)
    if not options.op:
        rows = [row for row in rows if row.op in ops]  # an operation may have been removed
    table.write(table.Table(triton.__version__, tuple(rows)), options.table)


def _differences(found: Survey, ops: Sequence[str], options: argparse.Namespace) -> list[str]:
    import triton

    if not options.table.exists():
        return [f"{options.table} does not exist; {table.COMMAND} writes it."]
    stored = table.read(options.table)
    if stored.triton_version != triton.__version__:
        _say(f"The table is of Triton {stored.triton_version}, here is {triton.__version__}: not compared.")
        return []
    rows = [row for row in stored.rows if row.arch in options.arch and (row.op in ops or not options.op)]
    return list(table.differences(rows, found.rows, is_whole=options.all or options.update))


def _report(found: Survey, differences: Sequence[str]) -> int:
    _say(table.render(found.rows))
    for finding in found.findings:
        _say(str(finding))
    for difference in differences:
        _say(difference)
    if differences:
        _say(f"The compiled kernels differ from the table. If that is intended: {table.COMMAND}, and commit the diff.")
    _say(f"{len(found.rows)} kernels compiled, {len(found.findings)} findings, {len(differences)} differences.")
    return 1 if found.findings or differences else 0


def _fail(text: str) -> int:
    _log(text)
    return 2


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # a command


def _say(text: str) -> None:
    print(text)  # noqa: T201  # a command


if __name__ == "__main__":
    sys.exit(main())
