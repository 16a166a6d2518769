"""What the parts that explain a server cost its API process: resumable streams, receipts, `/live`, a shadow scheduler.

Servers with the echoing model runner take turns, each with some of the parts. The figure is the processor time of the
API process per token, so that it holds on a machine with other work.

    python packages/api-server/benchmarks/bench_parts.py
    python packages/api-server/benchmarks/bench_parts.py --turns 9 default resumable
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from bench_front_end import NUM_OUTPUT_TOKENS, Target, echo_server, streamed

NUM_TURNS = 9
NUM_STREAMS = 32
STEP_S = 0.025
KEYS = ("key-0", "key-1", "key-2", "key-3")  # a key may have 16 resumable answers
OPERATOR = "operator-key"
RESUME = "x-llmstack-resume: 60\r\n"
SHADOW = ("--shadow-scheduler", "max_num_batched_tokens=512")
RECEIPTS = ("--receipts", "{folder}/key.pem")


@dataclass(frozen=True)
class Parts:
    """A server and what its clients ask for."""

    options: tuple[str, ...] = ()
    is_resumable: bool = False
    has_live_reader: bool = False


ALL_PARTS = {
    "no statistics": Parts(("--disable-log-stats", "--no-ui", "--step-log-bytes", "0")),
    "default": Parts(),
    "resumable": Parts(is_resumable=True),
    "receipts": Parts(RECEIPTS),
    "live": Parts(has_live_reader=True),
    "shadow": Parts(SHADOW),
    "everything": Parts((*RECEIPTS, *SHADOW), is_resumable=True, has_live_reader=True),
    "resumable, --state-dir": Parts(("--state-dir", "{folder}/state"), is_resumable=True),
}


@contextmanager
def live_reader(target: Target) -> Iterator[None]:
    """A process that reads `/live/events`."""
    command = ["curl", "-sN", "-H", f"Authorization: Bearer {OPERATOR}", "-o", "/dev/null"]
    url = f"http://{target.host}:{target.port}/live/events?engine=0&after=0"
    with subprocess.Popen([*command, url]) as process:
        try:
            yield
        finally:
            process.terminate()


def microseconds_per_token(target: Target, parts: Parts) -> float:
    """Processor time of the API process for each token of a load."""
    words = " ".join(f"w{i}" for i in range(32))
    body = {"prompt": words, "stream": True, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    more = RESUME if parts.is_resumable else ""
    with_headers = replace(target, headers=tuple(f"Authorization: Bearer {key}\r\n{more}" for key in KEYS))
    with ExitStack() as stack:
        if parts.has_live_reader:
            stack.enter_context(live_reader(target))
            time.sleep(0.3)
        figures = streamed(with_headers, "/v1/completions", body, NUM_STREAMS, 2 * NUM_STREAMS)
    return 1e6 / figures["tokens per CPU second"]


def num_refused(target: Target) -> float:
    """Requests that were not resumable, since there was no room."""
    request = Request(f"http://{target.host}:{target.port}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"})
    with urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    start = 'llmstack:resumable_streams_total{outcome="refused"}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def measure(names: Sequence[str], num_turns: int = NUM_TURNS) -> dict[str, list[float]]:
    """Microseconds per token in each turn."""
    found: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder, "operators").write_text(OPERATOR)
        make_key = [sys.executable, "-m", "llmstack_command", "receipt-key", f"{folder}/key.pem"]
        subprocess.run(make_key, check=True, stdout=subprocess.DEVNULL)
        options_to_target: dict[tuple[str, ...], Target] = {}
        for name in names:
            options = ALL_PARTS[name].options
            if options not in options_to_target:
                given = ["--api-key", *KEYS, "--operator-key-file", f"{folder}/operators"]
                given += [part.format(folder=folder) for part in options]
                options_to_target[options] = stack.enter_context(echo_server(STEP_S, given))
                microseconds_per_token(options_to_target[options], Parts())
        for _ in range(num_turns):
            for name in names:
                parts = ALL_PARTS[name]
                found[name].append(microseconds_per_token(options_to_target[parts.options], parts))
        assert not any(map(num_refused, options_to_target.values()))
    return found


def test_parts(benchmark: Any) -> None:
    found: list[dict[str, list[float]]] = []
    benchmark.pedantic(lambda: found.append(measure(list(ALL_PARTS))), rounds=1, iterations=1)
    benchmark.extra_info.update({name: round(median(values), 2) for name, values in found[0].items()})


def main() -> None:
    """Prints a line for each server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(ALL_PARTS)}")
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    options = parser.parse_args()
    found = measure(options.names or list(ALL_PARTS), options.turns)
    base = next(iter(found.values()))
    for name, values in found.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        print(f"{name:>24}  {median(values):6.2f} us per token  {median(ratios):.3f}  {[round(v, 2) for v in values]}")


if __name__ == "__main__":
    main()
