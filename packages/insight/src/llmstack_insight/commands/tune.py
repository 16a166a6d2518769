"""The subcommand `llmstack tune`.

`llmstack --help` imports it, so it imports little.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_insight.commands.arguments import above_zero, positive

if TYPE_CHECKING:
    from llmstack_engine_client.prediction.cost_model import LinearCostModel
    from llmstack_insight.rerun import ControlPlane, RecordedRequest, RecordedRequests
    from llmstack_insight.tune.report import TuneReport

DEFAULT_LINE = "llmstack serve MODEL"


class TuneError(Exception):
    """There is nothing to search; one line."""


class TuneCommand:
    """`llmstack tune --log FILE --target 'ttft_p99<500ms'`."""

    name = "tune"
    help = "search settings that meet a target, on the requests of a step log"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags of `llmstack tune`."""
        add = parser.add_argument
        add("--log", type=Path, required=True, metavar="FILE", help="what `llmstack serve --record-steps FILE` wrote")
        add(
            "--target",
            required=True,
            metavar="CONDITIONS",
            help="such as 'ttft_p99<500ms,preemptions<=10': ttft, tpot, e2e or queue with _mean, _max or _p1 to "
            "_p99.999 and a unit (s, ms, us), or preemptions, refused, output_tokens_per_s",
        )
        add("--serve-cmd", metavar="LINE",
            help="the command that starts the server; the found settings replace its own flags (default: "
            f"{DEFAULT_LINE})")  # fmt: skip
        add("--cost-model", type=Path, metavar="FILE", help="how long steps take, as in `llmstack simulate` (default: "
            "fitted to the log)")  # fmt: skip
        add("--max-num-blocks", type=positive, metavar="N",
            help="try more blocks of the KV cache, up to N (default: as many as recorded)")  # fmt: skip
        add("--policy", action="append", default=[], metavar="NAME",
            help="a further scheduling policy to try (default: those between which the requests differ)")  # fmt: skip
        add("--speed", type=above_zero, default=1.0, metavar="X",
            help="let the requests arrive X times as fast (default: 1)")  # fmt: skip
        add("--max-requests", type=positive, default=20_000, metavar="N",
            help="only the first N requests (default: 20000)")  # fmt: skip
        add("--max-runs", type=positive, default=40, metavar="N", help="settings to try at most (default: 40)")
        add("--time-limit", type=above_zero, default=120.0, metavar="S",
            help="try no further settings after S seconds (default: 120)")  # fmt: skip
        _add_check_arguments(parser)
        add("--json", action="store_true", help="print one JSON object")

    def run(self, namespace: argparse.Namespace) -> int:
        """0: settings that meet the target; 1: none that were tried do, or the log is of no use; 2: a wrong flag."""
        from llmstack_engine_client.prediction.errors import SimulationError
        from llmstack_insight.rerun import PlaneError
        from llmstack_insight.tune.check import CheckError
        from llmstack_insight.tune.target import TargetError
        from llmstack_step_log import StepLogError

        try:
            report = _tune(namespace)
        except TargetError as error:
            return _fail(f"--target: {error}", 2)
        except StepLogError as error:
            return _fail(f"{namespace.log}: {error}", 1)
        except CheckError as error:
            return _fail(f"--check: {error}", 1)
        except (SimulationError, PlaneError, TuneError) as error:
            return _fail(str(error), 1)
        text = json.dumps(report.to_json(), indent=2) if namespace.json else report.to_text()
        sys.stdout.write(text + "\n")
        return 0 if report.is_met else 1


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("check on a real server, with `llmstack bench`").add_argument
    add("--check", action="store_true", help="start --serve-cmd with the found settings and measure it")
    add("--check-url", metavar="URL", help="measure this running server, which has the found settings already")
    add("--check-requests", type=positive, default=200, metavar="N",
        help="send the first N requests of the log, at their times (default: 200)")  # fmt: skip
    add("--check-timeout", type=above_zero, default=3600.0, metavar="S", help="for the check (default: 3600)")


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"llmstack tune: error: {message}\n")
    return code


def _tune(namespace: argparse.Namespace) -> TuneReport:
    from llmstack_insight.rerun import recorded_plane, requests_of_log
    from llmstack_insight.tune.arrivals import at_speed
    from llmstack_insight.tune.figures import figures_of
    from llmstack_insight.tune.report import TuneReport
    from llmstack_insight.tune.search import SearchLimits, Space, search
    from llmstack_insight.tune.target import parse_target
    from llmstack_step_log import read_step_log

    target = parse_target(namespace.target)
    serve = _serve_line(namespace)
    run = read_step_log(namespace.log)
    log = requests_of_log(run)
    requests = log.requests[: namespace.max_requests]
    if not requests:
        raise TuneError(f"{namespace.log} has no requests that can be simulated")
    cost_model = _cost_model(log, namespace.cost_model)
    plane = recorded_plane(*run.header.configs())
    span_s = max(one.end_s for one in requests) - requests[0].arrival_s
    recorded = figures_of([one.outcome for one in requests], span_s)
    requests = at_speed(requests, namespace.speed)
    space = Space.of(requests, plane.scheduler.policy, namespace.max_num_blocks)
    space = replace(space, policies=tuple(dict.fromkeys([*space.policies, *_policies(namespace.policy)])))
    found = search(requests, plane, cost_model, target, space, SearchLimits(namespace.max_runs, namespace.time_limit))
    report = TuneReport(target, recorded, found, serve, len(requests), log.num_left_out + log.num_refused)
    is_checked = namespace.check or namespace.check_url is not None
    return _checked(report, requests, plane, cost_model, namespace) if is_checked else report


def _serve_line(namespace: argparse.Namespace) -> list[str]:
    from llmstack_insight.tune.command_line import split_line

    if namespace.check and namespace.serve_cmd is None:
        raise TuneError("--check: needs --serve-cmd, such as 'llmstack serve gpt2'")
    try:
        return split_line(namespace.serve_cmd or DEFAULT_LINE)
    except ValueError as error:
        raise TuneError(f"--serve-cmd: {error}") from error


def _policies(names: Sequence[str]) -> Sequence[str]:
    from llmstack_core_scheduler.request_queue import POLICIES

    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise TuneError(f"--policy: there is no policy {unknown[:64]!r}; there are {', '.join(POLICIES)}")
    return names


def _cost_model(log: RecordedRequests, path: Path | None) -> LinearCostModel:
    from llmstack_engine_client.prediction.errors import SimulationError
    from llmstack_insight.rerun import fit_to_steps
    from llmstack_insight.simulate.calibration import load_cost_model

    if path is not None:
        return load_cost_model(path)
    try:
        return fit_to_steps(log.steps)
    except SimulationError as error:
        raise TuneError(f"the log calibrates no cost model: {error}; give --cost-model, or a longer log") from error


def _checked(
    report: TuneReport,
    requests: Sequence[RecordedRequest],
    plane: ControlPlane,
    cost_model: LinearCostModel,
    namespace: argparse.Namespace,
) -> TuneReport:
    """The report with what a real server gave, beside what is expected of the same requests."""
    from llmstack_insight.rerun import changed_plane, rerun
    from llmstack_insight.tune.arrivals import sendable
    from llmstack_insight.tune.check import measure
    from llmstack_insight.tune.figures import figures_of

    sent = sendable(requests, namespace.check_requests)
    if not sent:
        raise TuneError("the log has no requests that can be sent to a server")
    best = report.found.best
    if best.settings:
        plane = changed_plane(plane, ",".join(f"{name}={value}" for name, value in best.settings.items()))
    expected = figures_of(rerun(sent, plane.build(), cost_model))
    if namespace.check_url is not None:
        measured = measure(sent, url=namespace.check_url, timeout_s=namespace.check_timeout)
    else:
        measured = measure(sent, serve=report.command, timeout_s=namespace.check_timeout)
    return replace(report, measured=measured, expected=expected)
