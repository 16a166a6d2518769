"""A measurement of the real server under the load of a log, by `llmstack bench`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from llmstack_insight.rerun import RecordedRequest
from llmstack_insight.tune.arrivals import write_load
from llmstack_insight.tune.figures import LATENCIES

TIMEOUT_S: Final = 3600.0
# A server may take a minute to end.
STOP_TIMEOUT_S: Final = 90.0
MAX_RESULT_BYTES: Final = 64 << 20
MAX_LINE: Final = 300
COMMAND: Final = (sys.executable, "-m", "llmstack_command")
QUEUE_FLAG: Final = "--max-queue-wait"
_PERCENTILES: Final = "50,90,99"


class CheckError(Exception):
    """The server was not measured; one line."""


def measure(
    requests: Sequence[RecordedRequest],
    *,
    url: str | None = None,
    serve: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Sends the requests at their times to the server at `url`, or to one that the line `serve` starts.

    Returns the figures in seconds, under the names of `Figures.to_json`.

    Raises:
        CheckError: The server does not start or answers nothing, or `llmstack bench` is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="llmstack-tune-") as name:  # prompts lie in it; only the owner can enter
        folder = Path(name)
        load = folder / "load.jsonl"
        write_load(requests, load)
        bench = [
            *COMMAND, "bench", "serve", "--dataset-name", "custom", "--dataset-path", str(load),
            "--num-prompts", str(len(requests)), "--ignore-eos", "--num-warmups", "1", "--disable-tqdm",
            "--metric-percentiles", _PERCENTILES,
        ]  # fmt: skip
        if url is not None:
            path = folder / "result.json"
            _run([*bench, "--base-url", url.rstrip("/").removesuffix("/v1"), "--output-json", str(path)], timeout_s)
            return _figures(_read(path), len(requests))
        line = [*COMMAND, *serve[1:]] if serve[0] == "llmstack" else list(serve)
        if QUEUE_FLAG not in {word.partition("=")[0] for word in line}:
            line += [QUEUE_FLAG, "0"]  # a queue that is longer than the server likes is what is to be measured
        sweep = [*COMMAND, "bench", "sweep", "--serve-cmd", shlex.join(line), "--bench-cmd", shlex.join(bench)]
        _run([*sweep, "--num-runs", "1", "--output-dir", str(folder / "results")], timeout_s)
        return _figures(_read(folder / "results" / "summary.json"), len(requests))


def _run(command: Sequence[str], timeout_s: float) -> None:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise CheckError(f"llmstack bench cannot be run: {error.strerror}") from error
    try:
        said, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"the check took longer than {timeout_s:g} s") from error
    finally:
        _stop(process)
    if process.returncode:
        lines = (errors.strip() or said.strip() or "it says nothing").splitlines()
        raise CheckError(f"llmstack bench ended with {process.returncode}: {lines[-1].strip()[:MAX_LINE]}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupts what still runs: it ends the server that it has started, which a kill would leave behind."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise CheckError("llmstack bench wrote more than is read")
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckError(f"llmstack bench wrote no result: {error}") from error
    values = read[0] if isinstance(read, list) and read else read
    if not isinstance(values, dict):
        raise CheckError("llmstack bench wrote no result")
    return values


def _figures(values: dict[str, Any], num_requests: int) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": num_requests, "failed": values.get("failed")}
    for latency in LATENCIES:
        bench_name = "e2el" if latency == "e2e" else latency
        named = {"mean": f"mean_{bench_name}_ms"} | {f"p{p}": f"p{p}_{bench_name}_ms" for p in (50, 90, 99)}
        if any(name in values for name in named.values()):
            found[f"{latency}_s"] = {
                key: values[name] / 1000 for key, name in named.items() if isinstance(values.get(name), int | float)
            }
    found["output_tokens_per_s"] = values.get("output_throughput")
    return found
