"""Preparation of recorded requests for a search or a check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmstack_insight.rerun import RecordedRequest


def at_speed(requests: Sequence[RecordedRequest], speed: float) -> list[RecordedRequest]:
    """The same requests, arriving `speed` times as fast; deadlines move with their arrivals."""
    if not requests or speed == 1.0:
        return list(requests)
    first_s = requests[0].arrival_s
    return [_moved(one, first_s + (one.arrival_s - first_s) / speed) for one in requests]


def _moved(recorded: RecordedRequest, arrival_s: float) -> RecordedRequest:
    request, by_s = recorded.request, arrival_s - recorded.arrival_s
    deadline_s = None if request.deadline_s is None else request.deadline_s + by_s
    moved = replace(request, arrival_time_s=request.arrival_time_s + by_s, deadline_s=deadline_s)
    return replace(recorded, request=moved, arrival_s=arrival_s)


def sendable(requests: Sequence[RecordedRequest], max_requests: int) -> list[RecordedRequest]:
    """The first requests that a load generator can send: completions of the base model with at least one token."""
    found = [one for one in requests if one.token_ids and not one.request.lora_name and not one.request.pooling_params]
    return found[:max_requests]


def write_load(requests: Sequence[RecordedRequest], path: Path) -> None:
    """Writes requests as `llmstack bench serve --dataset-name custom` reads them: one JSON object per line.

    Raises:
        OSError: The file cannot be written.
    """
    first_s = requests[0].arrival_s
    with path.open("x", encoding="utf-8") as file:
        for one in requests:
            request = one.request
            line = {
                "prompt_token_ids": [*request.prompt_token_ids, *request.output_token_ids],
                "output_tokens": len(one.token_ids),
                "timestamp": 1000.0 * (one.arrival_s - first_s),
            }
            file.write(json.dumps(line) + "\n")
