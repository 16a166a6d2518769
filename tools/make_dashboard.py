"""Writes docs/grafana/llmstack.json, the Grafana dashboard: `python tools/make_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "llmstack.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
LABELS = 'model_name=~"$model", engine=~"$engine"'
WIDTH, HEIGHT = 8, 7


def rate(name: str, labels: str = LABELS) -> str:
    """Growth per second of a counter, over all processes and engines."""
    return f"sum(rate(llmstack:{name}{{{labels}}}[$__rate_interval]))"


def quantiles(name: str) -> list[tuple[str, str]]:
    """The quantiles that people look at, of a histogram."""
    buckets = f"sum by (le) (rate(llmstack:{name}_bucket{{{LABELS}}}[$__rate_interval]))"
    return [(f"p{share}", f"histogram_quantile(0.{share}, {buckets})") for share in (50, 95, 99)]


def mean(name: str) -> str:
    """The mean of a histogram."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def by(label: str, name: str, labels: str = LABELS) -> str:
    """Growth per second of a counter, by one of its labels."""
    return f"sum by ({label}) (rate(llmstack:{name}{{{labels}}}[$__rate_interval]))"


def gauge(name: str, how: str = "sum") -> str:
    """A gauge over all engines."""
    return f"{how}(llmstack:{name}{{{LABELS}}})"


# Title, unit, legends and queries; three in a row.
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Requests", "short", [("running", gauge("num_requests_running")), ("waiting", gauge("num_requests_waiting"))]),
    ("Tokens per second", "short", [
        ("generated", rate("generation_tokens_total")), ("prompt", rate("prompt_tokens_total")),
        ("of these cached", rate("prompt_tokens_cached_total")),
    ]),
    ("KV cache in use", "percentunit", [("mean of the engines", gauge("kv_cache_usage_perc", "avg"))]),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Between two tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("e2e_request_latency_seconds")),
    ("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    ("Mean time of each stage", "s", [
        ("queue", mean("request_queue_time_seconds")), ("prefill", mean("request_prefill_time_seconds")),
        ("decode", mean("request_decode_time_seconds")),
    ]),
    ("Where a step's time goes", "percentunit", [
        ("{{phase}}", f"{by('phase', 'step_phase_seconds_total')} / scalar({rate('step_phase_seconds_total')})"),
    ]),
    ("Completions that ended, per second", "short", [
        ("{{finished_reason}}", by("finished_reason", "request_success_total")),
    ]),
    ("Refused since a queue was full, per second", "short", [
        ("{{reason}}", by("reason", "admission_rejections_total", 'model_name=~"$model"')),
    ]),
    ("HTTP answers per second", "short", [
        ("{{route}} {{status}}", "sum by (route, status) (rate(llmstack:http_requests_total[$__rate_interval]))"),
    ]),
    ("Prefix cache: tokens found", "percentunit", [
        ("of those looked up", f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"),
    ]),
    ("Preemptions per second", "short", [("preemptions", rate("num_preemptions_total"))]),
    ("Accepted draft tokens", "percentunit", [
        ("of those computed",
         f"{rate('spec_decode_num_accepted_tokens_total')} / {rate('spec_decode_num_draft_tokens_total')}"),
    ]),
    ("Tokens per step", "short", quantiles("iteration_tokens_total")),
    ("Prompt tokens of a request", "short", quantiles("request_prompt_tokens")),
    ("Tokens of a completion", "short", quantiles("request_generation_tokens")),
    ("Requests without progress", "short", [("stuck", "sum(llmstack:num_requests_stuck)")]),
    ("Steps per second", "short", [("steps", rate("engine_steps_total"))]),
    ("State of the server", "short", [("{{state}}", "sum by (state) (llmstack:lifecycle_state)")]),
]  # fmt: skip


def make_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "llmstack",
        "uid": "llmstack",
        "tags": ["llmstack", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            variable("model", "Model", "model_name"), variable("engine", "Engine", "engine"),
        ]},
        "panels": [make_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }  # fmt: skip


def variable(name: str, label: str, metric_label: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    query = f"label_values(llmstack:num_requests_running, {metric_label})"
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "includeAll": True, "multi": True, "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def make_panel(number: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    """One graph over time."""
    row, column = divmod(number, 24 // WIDTH)
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "legendFormat": legend, "expr": query}
        for index, (legend, query) in enumerate(queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def main() -> None:
    """Writes the file."""
    PATH.write_text(json.dumps(make_dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
