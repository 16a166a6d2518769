"""Measures the kernels, or the engine, on this GPU: ceilings, correctness, speed, and what was predicted.

    python benchmarks/gpu_report.py --part kernels --budget 540

needs torch and Triton, and for the engine transformers and safetensors; nothing has to be installed. Blocks run in the
order of their importance until the budget is spent; those dropped are named. The last thing printed is a short table;
everything is written as JSON. `--smoke` runs the same code on tiny shapes on a CPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report.blocks import CEILINGS, PARTS, Block
from report.journal import Journal, Results
from report.plan import empty_markdown, ladder_table, short_table
from report.rows import number, table
from report.supervisor import Settings, run

SMOKE_WARNING = "SMOKE RUN: tiny shapes on a CPU. No figure below means anything."
RESERVE_S = 5
"""Kept of the budget for starting, ending and writing."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 with a report, 2 where there is nothing to measure on."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - {block.name for block in PARTS[options.part]}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is no block of --part {options.part}")
    if options.print_plan:
        print(empty_markdown())
        return 0
    complaint = None if options.smoke else _why_not_here()
    if complaint is not None:
        print(complaint, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worker is ended too
    deadline_s = time.monotonic() + options.budget - (0 if options.smoke else RESERVE_S)
    journal = _new_journal(options)
    try:
        run(Settings(options.part, options.smoke, deadline_s), _chosen(options), journal)
    finally:
        results = Results.read(journal)
        _write(options, results)
    print(_summary(options, results), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=sorted(PARTS), default="kernels")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="no block overruns it (540)")
    default = Path(os.environ.get("OUT", ".")) / "gpu_report.json"
    parser.add_argument("--json", type=Path, default=default, help="where the figures go (%(default)s)")
    parser.add_argument("--only", action="append", metavar="BLOCK", help="run this block and the ceilings; repeatable")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to see that it runs")
    parser.add_argument(
        "--print-plan", action="store_true", help="the short table as Markdown, empty, and nothing else"
    )
    return parser


def _chosen(options: argparse.Namespace) -> list[Block]:
    """All blocks of the part, or those that were asked for and the ceilings they are measured against."""
    blocks = PARTS[options.part]
    if options.only is None:
        return list(blocks)
    names = {*options.only, CEILINGS.name}
    return [block for block in blocks if block.name in names]


def _new_journal(options: argparse.Namespace) -> Journal:
    """Beside the figures, so that a run which is killed leaves what it had by then."""
    path: Path = options.json.with_suffix(".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return Journal(path)


def _why_not_here() -> str | None:
    try:
        import torch
    except ImportError:
        return "gpu_report needs PyTorch, which cannot be imported."
    if not torch.cuda.is_available():
        return "gpu_report needs an NVIDIA GPU, and PyTorch finds none; --smoke runs the same code on the CPU."
    return None


def _write(options: argparse.Namespace, results: Results) -> None:
    figures = {"part": options.part, "is_smoke": options.smoke, "budget_s": options.budget, **results.to_json()}
    options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def _summary(options: argparse.Namespace, results: Results) -> str:
    """Ceilings, what became of each block, predictions, and the short table last."""
    parts = [""]
    parts += [SMOKE_WARNING] if options.smoke else []
    parts += [table(("ceiling of this run", "value"), [(name, number(v)) for name, v in results.ceilings.items()]), ""]
    outcomes = [(block, f"{results.seconds[block]:.0f}", outcome) for block, outcome in results.outcomes.items()]
    parts += [table(("block", "s", "outcome"), outcomes), ""]
    if options.part == "engine":
        parts += [ladder_table(), ""]
    parts += [f"all figures: {options.json}"]
    if options.part != "tests":
        parts += ["", short_table(options.part, results.by_name())]
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
