"""What a resumable stream costs the API process, beside one that ends with its connection.

Both take turns against one server with the echoing model runner. The figure is processor time per token, so that it
holds on a machine with other work.

    python packages/api-server/benchmarks/bench_resumable.py
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from bench_front_end import NUM_OUTPUT_TOKENS, Target, echo_server, streamed

NUM_TURNS = 9
NUM_STREAMS = 16  # as many as one API key may have
STEP_S = 0.01
HEADERS = {"without": "", "resumable": "x-llmstack-resume: 60\r\n"}


def microseconds_per_token(target: Target, headers: str) -> float:
    """Processor time of the API process for each token of a load."""
    words = " ".join(f"w{i}" for i in range(32))
    body = {"prompt": words, "stream": True, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    with_headers = replace(target, headers=headers)
    figures = streamed(with_headers, "/v1/completions", body, NUM_STREAMS, 4 * NUM_STREAMS)
    return 1e6 / figures["tokens per CPU second"]


def measure() -> dict[str, float]:
    """Median microseconds per token with and without, and their ratio."""
    found: dict[str, list[float]] = {name: [] for name in HEADERS}
    with echo_server(STEP_S) as target:
        microseconds_per_token(target, "")
        for _ in range(NUM_TURNS):
            for name, headers in HEADERS.items():
                found[name].append(microseconds_per_token(target, headers))
    medians = {name: median(values) for name, values in found.items()}
    return medians | {"ratio": medians["resumable"] / medians["without"]}


def test_resumable_streams(benchmark: Any) -> None:
    found: list[dict[str, float]] = []
    benchmark.pedantic(lambda: found.append(measure()), rounds=1, iterations=1)
    benchmark.extra_info.update({name: round(value, 2) for name, value in found[0].items()})


if __name__ == "__main__":
    print({name: round(value, 2) for name, value in measure().items()})
