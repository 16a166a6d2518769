"""The subcommand `llmstack replay`.

`llmstack --help` imports it, so it imports little.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_step_log import RecordedRun, Run
    from llmstack_step_log.replay.verify import ReplayReport

MAX_PAGE_STEPS = 5000


class ReplayCommand:
    """`llmstack replay FILE [--against OTHER | --page OUT | --from-step N]`."""

    name = "replay"
    help = "derive the decisions of a recorded run again, and prove or compare them"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags of `llmstack replay`."""
        parser.add_argument("file", type=Path, metavar="FILE", help="what `llmstack serve --record-steps FILE` wrote")
        other = parser.add_mutually_exclusive_group()
        other.add_argument(
            "--page",
            type=Path,
            metavar="OUT.html",
            help=f"write a page that draws the last {MAX_PAGE_STEPS} steps: requests over steps, without a server",
        )
        other.add_argument(
            "--from-step",
            type=int,
            metavar="N",
            help="prove what follows the last snapshot at or before step N, without what comes before it",
        )
        other.add_argument(
            "--against",
            metavar="OTHER",
            help="name the first decision that differs from the run under OTHER: a policy (fcfs, priority), settings "
            "(max_num_batched_tokens=512,num_blocks=100), module:Class of a scheduler, or the path of another "
            "installation (a wheel, a folder of packages, a checkout)",
        )

    def run(self, namespace: argparse.Namespace) -> int:
        """0: as recorded, or no difference. 1: a difference, or a log that cannot be replayed; 2: a wrong OTHER."""
        from llmstack_step_log import StepLogError, read_step_log
        from llmstack_step_log.replay.against import AgainstError

        path = namespace.file
        try:
            if namespace.page is not None:
                return _draw(path, namespace.page)
            if namespace.from_step is not None:
                return _verify_from(path, namespace.from_step)
            if namespace.against is not None:
                return _compare(read_step_log(path), path, namespace.against)
            return _verify(path)
        except AgainstError as error:
            sys.stderr.write(f"llmstack replay: error: --against: {error}\n")
            return 2
        except StepLogError as error:
            sys.stderr.write(f"llmstack replay: error: {path}: {error}\n")
            return 1


def _verify(path: Path) -> int:
    from llmstack_step_log import read_step_log
    from llmstack_step_log.replay.verify import verify

    run = read_step_log(path)
    report = verify(run)
    return _say_what_is_proven(run, path, report, f"{report.num_steps} steps")


def _verify_from(path: Path, num_steps: int) -> int:
    from llmstack_step_log.replay.verify import verify
    from llmstack_step_log.seek import LogFile

    with closing(LogFile(path)) as file:
        run = file.part_from(num_steps)
        report = verify(run)
    for note in run.notes:
        sys.stderr.write(f"llmstack replay: {note}\n")
    first = 0 if run.start is None else run.start.place.num_steps
    return _say_what_is_proven(run, path, report, f"steps {first} to {report.num_steps}")


def _say_what_is_proven(run: Run, path: Path, report: ReplayReport, steps: str) -> int:
    from llmstack_step_log import StepLogError

    counts = f"{steps}, {report.num_requests} requests, {report.num_tokens} tokens"
    if run.truncated_at is not None:
        raise StepLogError(
            f"is truncated or damaged after byte {run.truncated_at}; up to there ({counts}) every decision is as "
            f"recorded, hash {report.digest}"
        )
    note = "" if report.is_closed else " (the log was not closed: the server was killed, or still runs)"
    sys.stdout.write(f"{path}: {counts}: every decision is as recorded, hash {report.digest}{note}\n")
    return 0


def _draw(path: Path, page: Path) -> int:
    from llmstack_insight.first_tokens import predictions_of_log
    from llmstack_insight.steps_of_log import steps_of_log
    from llmstack_insight.timeline import timeline_of, timeline_page
    from llmstack_step_log.seek import last_steps

    with last_steps(path, MAX_PAGE_STEPS) as run:
        last = steps_of_log(run, MAX_PAGE_STEPS)
        timeline = {**timeline_of(last), "predictions": predictions_of_log(run, last)}
    try:
        page.write_text(timeline_page(timeline).text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"llmstack replay: error: --page: {page} cannot be written: {error.strerror}\n")
        return 2
    sys.stdout.write(f"{path}: {len(last.steps)} steps are drawn in {page}\n")
    return 0


def _compare(run: RecordedRun, path: Path, against: str) -> int:
    from llmstack_step_log.replay.against import decisions_against, decisions_as_recorded
    from llmstack_step_log.replay.compare import describe, first_difference

    theirs = decisions_against(run, path, against)
    num_equal, difference = first_difference(decisions_as_recorded(run), theirs)
    if difference is None:
        sys.stdout.write(f"{path}: {num_equal} decisions: none differs under {against}\n")
        return 0
    first = difference.ours or difference.theirs
    where = "the end" if first is None else f"step {first.step}"
    sys.stdout.write(
        f"{path}: {num_equal} decisions are the same, the first that differs under {against} is at {where}:\n"
        f"{describe(difference, 'as recorded', against)}\n"
    )
    return 1
