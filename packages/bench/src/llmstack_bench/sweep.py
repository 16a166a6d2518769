"""Measurements of servers over sets of flags: every server with every load."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.startup import (
    HOST,
    Waiter,
    command_with_port,
    health_status,
    is_port_open,
    started_command,
)

MAX_MEASUREMENTS = 10_000
MAX_NAME_CHARS = 120
WARMUP_NUMBER = 1_000_000  # also its seed, which no counted run has
Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One run of the load against a server."""

    serve: Params
    bench: Params
    number: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"run={self.number}.json"

    def as_warmup(self, num_prompts: int) -> _Measurement:
        """A short run of the same load, with prompts of its own and a file that the summary leaves out."""
        return replace(self, number=WARMUP_NUMBER, bench={**self.bench, "num_prompts": num_prompts})


def run_sweep(options: argparse.Namespace) -> int:
    """Measures what the flags of `commands.sweep` describe.

    Raises:
        BenchError: A file is no set of flags, a server does not start, or a measurement fails.
    """
    servers, loads = (
        read_params("--serve-params", options.serve_params),
        read_params("--bench-params", options.bench_params),
    )
    if len(servers) * len(loads) * options.num_runs > MAX_MEASUREMENTS:
        raise BenchError(f"--num-runs: more than {MAX_MEASUREMENTS} measurements in all", exit_code=2)
    folder = options.output_dir / options.experiment_name
    pairs = [[(serve, bench) for bench in loads if _is_linked(serve, bench, options.link_vars)] for serve in servers]
    planned = [
        [
            _Measurement(serve, bench, number, folder / _name("serve", serve) / _name("bench", bench))
            for serve, bench in group
            for number in range(options.num_runs)
        ]
        for group in pairs
    ]
    if len({one.folder for group in planned for one in group}) != sum(map(len, pairs)):
        raise BenchError("--serve-params, --bench-params: two sets of flags have one name", exit_code=2)
    if not any(pairs):
        raise BenchError("--link-vars: no server and load are equal in these", exit_code=2)
    failures = []
    for group in planned:
        missing = [one for one in group if not (options.resume and one.path.is_file())]
        if missing:
            failures += _measure(options, missing)
    if not options.dry_run:
        _write_summary(folder, [one for group in planned for one in group if one.path.is_file()])
    return 1 if failures else 0


def _is_linked(serve: Params, bench: Params, links: Sequence[tuple[str, str]]) -> bool:
    return all(ours in serve and theirs in bench and serve[ours] == bench[theirs] for ours, theirs in links)


def read_params(flag: str, path: Path | None) -> list[Params]:
    """The sets of flags of a file: a list of objects, or an object of named ones; one empty set without a file.

    Raises:
        BenchError: It cannot be read, or holds something else.
    """
    if path is None:
        return [{}]
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BenchError(f"{flag} {path}: {error}", exit_code=2) from error
    if isinstance(read, dict):
        read = [
            {"_benchmark_name": name, **value} if isinstance(value, dict) else value for name, value in read.items()
        ]
    if not isinstance(read, list) or not read or not all(isinstance(one, dict) for one in read):
        raise BenchError(f"{flag} {path}: must hold objects of flags", exit_code=2)
    return read


def with_flags(command: Sequence[str], params: Params) -> list[str]:
    """The command with these flags in place of its own of the same name."""
    words = list(command)
    for name, value in params.items():
        if name.startswith("_"):
            continue  # a name for people
        flag = "--" + name.replace("_", "-")
        words = _without(words, flag)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words


def _without(words: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    is_value = False
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name.replace("_", "-") in (flag, f"--no-{flag[2:]}"):
            is_value = "=" not in word
        elif not (is_value and not word.startswith("-")):
            kept.append(word)
            is_value = False
        else:
            is_value = False
    return kept


def _name(prefix: str, params: Params) -> str:
    """The name of a folder, from the flags."""
    named = params.get("_benchmark_name")
    text = str(named) if named else "-".join(f"{name}={value}" for name, value in params.items())
    kept = "".join(char if char.isalnum() or char in "-_.=" else "_" for char in text)
    return f"{prefix}--{kept}"[:MAX_NAME_CHARS] if kept else prefix


def _measure(options: argparse.Namespace, measurements: Sequence[_Measurement]) -> list[str]:
    """Measures one server; what failed, where --continue-on-error lets it go on.

    Raises:
        BenchError: The server or a measurement fails.
    """
    serve = with_flags(shlex.split(options.serve_cmd), measurements[0].serve)
    command, port = command_with_port(serve)
    failures: list[str] = []
    server = contextlib.nullcontext() if options.dry_run else _server(options, command, port)
    with _failing_softly(options, failures), server:
        if options.dry_run:
            sys.stdout.write(shlex.join(serve) + "\n")
        for one in measurements:
            with _failing_softly(options, failures):
                _measure_one(options, one, port, is_first=one.number == measurements[0].number)
    return failures


@contextlib.contextmanager
def _failing_softly(options: argparse.Namespace, failures: list[str]) -> Iterator[None]:
    """Runs one combination. With --continue-on-error, a failure is a line and an entry of the list."""
    try:
        yield
    except BenchError as error:
        if not options.continue_on_error:
            raise
        failures.append(str(error))
        sys.stderr.write(f"{error}\n")


def _measure_one(options: argparse.Namespace, one: _Measurement, port: int, *, is_first: bool) -> None:
    bench = _bench_command(options, one, port)
    runs = [bench]
    if options.warmup_num_prompts and is_first:
        runs.insert(0, _bench_command(options, one.as_warmup(options.warmup_num_prompts), port))
    for command in runs:
        if options.dry_run:
            sys.stdout.write(f"  {shlex.join(command)}\n")
            continue
        one.folder.mkdir(parents=True, exist_ok=True)
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        is_written = command is not bench or one.path.is_file()
        if code and one.path.is_file():
            one.path.replace(one.path.with_suffix(".failed.json"))  # neither a result, nor one to keep with --resume
        if code or not is_written:
            raise BenchError(f"--bench-cmd: ended with {code}, without {one.path}: {shlex.join(command)}")
    if options.after_bench_cmd and not options.dry_run:
        words = shlex.split(options.after_bench_cmd)
        code = subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode
        if code:
            raise BenchError(f"--after-bench-cmd: ended with {code}: {options.after_bench_cmd}")


@contextlib.contextmanager
def _server(options: argparse.Namespace, command: Sequence[str], port: int) -> Iterator[None]:
    if is_port_open(port):
        raise BenchError(f"--serve-cmd: port {port} is already in use", exit_code=2)
    with tempfile.TemporaryFile() as log, started_command(command, log, options.stop_timeout) as process:
        wait = Waiter(process, log, time.perf_counter(), options.timeout)
        wait.until(lambda: health_status(port, options.health_path) == 200, f"{options.health_path} answers 200")
        yield


def _bench_command(options: argparse.Namespace, one: _Measurement, port: int) -> list[str]:
    """The measurement with its place for results, the server's address, and a seed of its own.

    Equal prompts in the next run would be found in the prefix cache of the server.
    """
    words = with_flags(shlex.split(options.bench_cmd), one.bench)
    flags = {word.partition("=")[0] for word in words}
    if not flags & {"--base-url", "--port"}:
        words += ["--host", HOST, "--port", str(port)]
    if "--seed" not in flags:
        words += ["--seed", str(one.number)]
    return [*words, "--save-result", "--result-dir", str(one.folder), "--result-filename", one.path.name]


def _write_summary(folder: Path, measurements: Sequence[_Measurement]) -> None:
    """Writes all numbers of all measurements with their flags."""
    rows = []
    for one in measurements:
        result = json.loads(one.path.read_text(encoding="utf-8"))
        numbers = {name: value for name, value in result.items() if type(value) in (int, float)}
        rows.append({**_prefixed("serve", one.serve), **_prefixed("bench", one.bench), "run": one.number, **numbers})
    (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _prefixed(prefix: str, params: Params) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in params.items()}
