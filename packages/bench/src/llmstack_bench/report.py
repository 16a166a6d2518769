"""The table of `bench serve`: a column per server, and ratios to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmstack_bench.comparison import Server, ratios
from llmstack_bench.metrics import percentile_name
from llmstack_bench.table import format_number, format_ratio, format_table

_METRIC_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_RATES = (
    ("completed", "requests completed"),
    ("failed", "requests failed"),
    ("max_in_flight", "requests in flight, at most"),
    ("duration", "duration (s)"),
    ("total_input_tokens", "prompt tokens"),
    ("total_output_tokens", "output tokens"),
    ("request_throughput", "requests/s"),
    ("input_throughput", "prompt tokens/s"),
    ("output_throughput", "output tokens/s"),
    ("total_token_throughput", "all tokens/s"),
    ("request_goodput", "good requests/s"),
    ("goodput_fraction", "good requests, share"),
    ("cached_fraction", "prompts of sessions found in the cache, share"),
    ("median_ttft_turn_1_ms", "time to first token of turn 1, p50 (ms)"),
    ("median_ttft_turn_2_to_5_ms", "time to first token of turns 2 to 5, p50 (ms)"),
    ("median_ttft_turn_6_to_20_ms", "time to first token of turns 6 to 20, p50 (ms)"),
    ("median_ttft_turn_from_21_ms", "time to first token of later turns, p50 (ms)"),
    ("predicted_ttft_fraction", "first tokens as predicted, share"),
    ("server_cpu_s", "server CPU (s)"),
    ("server_cpu_ms_per_token", "server CPU per output token (ms)"),
    ("generator_cpu_s", "load generator CPU (s)"),
    ("p99_send_lag_ms", "sent late p99 (ms)"),
)


def format_report(
    servers: Sequence[Server], percentiles: Sequence[float], metrics: Sequence[str] = tuple(_METRIC_TITLES)
) -> str:
    """The table of all servers, then failures and notes."""
    columns = [server.medians() for server in servers]
    others = servers[1:]
    ratio_columns = [ratios(server, servers[0]) for server in others]
    header = [_first_heading(servers), *(server.label for server in servers)]
    header += [f"{server.label}/{servers[0].label}" for server in others]
    rows = []
    for name, title in _row_names(percentiles, metrics):
        if any(name in column for column in columns):
            cells = [format_number(column.get(name)) for column in columns]
            rows.append([title, *cells, *(format_ratio(column.get(name)) for column in ratio_columns)])
    return "\n".join([format_table(header, rows), *_remarks(servers)])


def _first_heading(servers: Sequence[Server]) -> str:
    num_runs = max(len(server.runs) for server in servers)
    return "result" if num_runs == 1 else f"median of {num_runs}"


def _row_names(percentiles: Sequence[float], metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name of a value and the title of its row."""
    yield from _RATES
    for metric in metrics:
        title = _METRIC_TITLES[metric]
        yield f"mean_{metric}_ms", f"{title} mean (ms)"
        for percent in percentiles:
            yield f"{percentile_name(percent)}_{metric}_ms", f"{title} {percentile_name(percent)} (ms)"


def _remarks(servers: Sequence[Server]) -> Iterator[str]:
    for server in servers:
        for number, run in enumerate(server.runs, 1):
            where = server.label if len(server.runs) == 1 else f"{server.label}, run {number}"
            for reason, count in run.summary.failures.items():
                yield f"failed ({where}): {count} x {reason}"
            for note in run.summary.notes:
                yield f"note ({where}): {note}"
        readings = [run.bandwidth_gb_per_s for run in server.runs if run.bandwidth_gb_per_s is not None]
        if readings:
            shown = ", ".join(f"{value:.1f}" for value in readings)
            yield f"memory read before each run ({server.label}): {shown} GB/s"
