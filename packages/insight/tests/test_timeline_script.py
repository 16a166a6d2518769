"""What the page of steps says of requests, by its own script in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from llmstack_insight.timeline import page

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")

# Shows what the page shows after each part of a stream.
SHOW = """
const data = emptyData();
const shown = [];
for (const part of JSON.parse(process.argv[1])) {
  add(data, part);
  const lanes = [...data.lanes.values()];
  for (const lane of lanes) lane.facts ??= factsOf(data, lane);
  shown.push(Object.fromEntries(lanes.map(({ id, facts }) => [id, facts])));
}
console.log(JSON.stringify(shown));
"""


def shown_after(*parts: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    script = page._read("steps.js") + SHOW
    command = ["node", "-e", script, json.dumps(parts)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: list[dict[str, dict[str, Any]]] = json.loads(result.stdout)
    return found


def part(
    steps: range, runs: list[list[Any]], events: list[list[Any]], predictions: list[list[Any]] | None = None
) -> dict[str, Any]:
    rows = [[number, float(number), 1.0, 1, 0, 1, 8, 0, 1] for number in steps]
    return {"steps": rows, "runs": runs, "events": events, "predictions": predictions or []}


def run(name: str, first: int, last: int, kind: str, tokens: int) -> list[Any]:
    return [name, first, last, kind, tokens, 0, 0, []]


def test_what_is_said_of_a_request_changes_while_it_runs() -> None:
    waiting, running, over = shown_after(
        part(range(1, 2), [], [["r", 1.0, "waiting"]]),
        part(range(2, 5), [run("r", 2, 2, "p", 8), run("r", 3, 4, "d", 2)], [["r", 2.0, "running"]]),
        part(range(5, 6), [run("r", 5, 5, "d", 1)], [["r", 5.5, "finished_length_capped"]]),
    )
    assert (waiting["r"]["state"], waiting["r"]["generated"]) == ("waiting", 0)
    assert (running["r"]["state"], running["r"]["generated"]) == ("running", 3)
    assert (over["r"]["state"], over["r"]["generated"]) == ("length limit", 4)


def test_a_prediction_that_comes_after_the_end_of_its_request_is_shown() -> None:
    before, after = shown_after(
        part(range(1, 2), [run("r", 1, 1, "p", 8)], [["r", 0.5, "waiting"], ["r", 1.5, "finished_stopped"]]),
        part(range(2, 3), [], [], [["r", 12.0, 15.0]]),
    )
    assert "predictedMs" not in before["r"]
    assert (after["r"]["predictedMs"], after["r"]["ttftMs"]) == (12.0, 15.0)


@pytest.mark.parametrize(
    ("runs", "end", "expected"),
    [
        ([("p", 8)], "finished_length_capped", 1),
        ([("p", 8)], "finished_aborted", 0),
        ([("p", 8)], "finished_stopped", 0),
        ([("p", 8), ("d", 2)], "finished_stopped", 3),
        ([("p", 8), ("d", 2), ("p", 10), ("d", 3)], "finished_stopped", 7),
        ([("p", 8), ("d", 2), ("p", 10)], "finished_aborted", 3),
    ],
)
def test_the_tokens_of_a_request_are_counted(runs: list[tuple[str, int]], end: str, expected: int) -> None:
    rows, step = [], 1
    for kind, tokens in runs:
        length = tokens if kind == "d" else 1
        rows.append(run("r", step, step + length - 1, kind, tokens))
        step += length
    (shown,) = shown_after(part(range(1, step), rows, [["r", 0.5, "waiting"], ["r", float(step), end]]))
    assert shown["r"]["generated"] == expected
