"""`llmstack top`: the requests of a running server, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

from llmstack_command.client.run import connect
from llmstack_command.client.terminal import without_control_characters
from llmstack_command.errors import ApiError

# Steps over which rates are averaged, and finished requests that stay in sight.
MAX_STEPS = 512
MAX_REQUESTS = 4096
MAX_SENTENCES = 8
NUM_STEP_VALUES = 8  # after its number
_CLEAR, _HIDE_CURSOR, _SHOW_CURSOR = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"
_COLUMNS = (
    f"{'REQUEST':<36} {'STATE':<22} {'QUEUED':>8} {'FIRST TOKEN':>12} {'PREDICTED':>10} {'PROMPT':>8} {'DECODED':>8}"
)


@dataclass(slots=True)
class Lane:
    """One request.

    Attributes:
        arrived_s: When it began to wait.
        began_s: When its first step began.
        first_token_s: When the step ended that gave its first token.
    """

    state: str = "running"
    arrived_s: float | None = None
    began_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_decoded_tokens: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state.startswith("finished")


@dataclass(slots=True)
class Board:
    """The state that `llmstack top` draws, from the stream of `/live/events`."""

    steps: dict[int, list[Any]] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    predictions: dict[str, list[Any]] = field(default_factory=dict)
    core: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        """Takes one event of the stream.

        Raises:
            ApiError: It has another form.
        """
        try:
            self._add(part)
        except (TypeError, ValueError, LookupError):
            raise ApiError("the stream has another form: is this a server of another version?") from None

    def _add(self, part: dict[str, Any]) -> None:
        core = str(part.get("core") or "")
        if self.core and core != self.core:  # after a crash or a reload the steps begin again
            self.steps, self.lanes = {}, {}
        self.core = core
        self.notes = [without_control_characters(line) for line in _notes(part)]
        for step in part["steps"]:
            number, *values = step
            if len(values) != NUM_STEP_VALUES:
                raise ValueError(f"a step has {len(values)} values")
            self.steps[int(number)] = [number, *map(_number_or_none, values)]
        for name, time_s, state in part["events"]:
            lane = self.lanes.setdefault(str(name), Lane())
            lane.state = str(state)
            if lane.arrived_s is None and lane.state.startswith("waiting"):
                lane.arrived_s = float(time_s)
        for name, first, last, kind, num_tokens, _, _ in part["runs"]:
            self._add_run(self.lanes.setdefault(str(name), Lane()), first, last, kind == "d", num_tokens)
        for name, *times in part.get("predictions", ()):
            self.predictions[str(name)] = [*map(_number_or_none, times)]
        _forget(self.steps, MAX_STEPS)
        _forget(self.lanes, MAX_REQUESTS)
        _forget(self.predictions, MAX_REQUESTS)

    def _add_run(self, lane: Lane, first: int, last: int, is_decode: bool, num_tokens: int) -> None:
        if lane.began_s is None and first in self.steps:
            lane.began_s = self.steps[first][1]
        if is_decode:
            lane.num_decoded_tokens += num_tokens
            # The last chunk of a prompt gives the first token; a prompt of one uncached token looks like a decode.
            at = first if lane.num_prompt_tokens == 0 else first - 1
            if lane.first_token_s is None and at in self.steps:
                lane.first_token_s = self.steps[at][1] + self.steps[at][2] / 1000
        else:
            lane.num_prompt_tokens += num_tokens

    def summary(self) -> str:
        """The last step, in one line."""
        if not self.steps:
            return "no steps yet"
        number, time_s, milliseconds, num_running, num_waiting, used, num_blocks, *_ = list(self.steps.values())[-1]
        first = next(step for step in self.steps.values() if time_s - step[1] <= 10)
        seconds = time_s - first[1] + milliseconds / 1000
        num_tokens = sum(step[8] for step in self.steps.values() if step[1] >= first[1])
        blocks = "" if used is None else f", {used} of {num_blocks} KV blocks"
        speed = f", {num_tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        load = f"{num_running} running, {num_waiting} waiting{blocks}"
        return f"step {number}: {load}{speed}, {milliseconds:.1f} ms per step"

    def lines(self, height: int) -> list[str]:
        """The summary and a table: requests that are not over first, then those that ended last."""
        living = [pair for pair in self.lanes.items() if not pair[1].is_over]
        ended = [pair for pair in reversed(self.lanes.items()) if pair[1].is_over]
        rows = [_row(name, lane, self._prediction_of(name)) for name, lane in (*living, *ended)]
        return [self.summary(), *self.notes, "", _COLUMNS, *rows][: max(1, height)]

    def _prediction_of(self, name: str) -> list[Any]:
        """The predicted and the real milliseconds to its first token; of several answers that of their request."""
        return self.predictions.get(name) or self.predictions.get(name.partition("_")[2]) or [None, None]


def _forget(named: dict[Any, Any], max_num_kept: int) -> None:
    for name in list(named)[:-max_num_kept]:
        del named[name]


def run_top(namespace: argparse.Namespace, stdout: TextIO | None = None) -> None:
    """Draws until Ctrl-C; without a terminal it prints one line per change.

    Raises:
        ApiError: The server cannot be reached, refuses, or ends.
    """
    stdout = sys.stdout if stdout is None else stdout
    parts = connect(namespace).watch(f"/live/events?engine={namespace.engine}")
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(parts):
        _draw(parts, stdout, is_once=namespace.once)


def _draw(parts: Iterable[dict[str, Any]], stdout: TextIO, *, is_once: bool) -> None:
    board, is_terminal = Board(), stdout.isatty() and not is_once
    said: list[str] = []
    try:
        if is_terminal:
            stdout.write(_HIDE_CURSOR)
        for part in parts:
            board.add(part)
            if is_once:
                stdout.write("\n".join(board.lines(MAX_REQUESTS)) + "\n")
                return
            if is_terminal:
                width, height = shutil.get_terminal_size()
                stdout.write(_CLEAR + "\n".join(line[:width] for line in board.lines(height - 1)))
            else:
                stdout.write(board.summary() + "\n")
                stdout.writelines(f"{note}\n" for note in (board.notes if board.notes != said else ()))
                said = board.notes
            stdout.flush()
    finally:
        if is_terminal:
            stdout.write(_SHOW_CURSOR + "\n")


def _notes(part: dict[str, Any]) -> list[str]:
    """The weights that answer, and what a shadow scheduler would have changed."""
    lines = []
    gap = part.get("gap")
    if gap and gap["reason"] == "steps_forgotten":
        lines.append(f"steps {int(gap['after']) + 1} to {int(gap['next']) - 1} are missing")
    elif gap:
        lines.append("another engine core: its steps begin again")
    if weights := part.get("weights"):
        before = weights["num_finishing"]
        lines.append(
            f"weights: {weights['name']}" + (f", {before} requests finish with those before" if before else "")
        )
    if shadow := part.get("shadow"):
        lines.append(f"shadow scheduler {shadow['name']}:")
        lines += [f"  {sentence}" for sentence in shadow["sentences"]][:MAX_SENTENCES]
    return lines


def _number_or_none(value: Any) -> float | None:
    return value if value is None or isinstance(value, int) else float(value)


def _row(name: str, lane: Lane, prediction: list[Any]) -> str:
    shown = without_control_characters(name)
    shown = shown if len(shown) <= 36 else f"{shown[:35]}…"
    state = lane.state.removeprefix("finished_").replace("_", " ") + (" (ended)" if lane.is_over else "")
    predicted, real = prediction
    queued, expected = _since(lane.arrived_s, lane.began_s), _milliseconds(predicted)
    first = _since(lane.arrived_s, lane.first_token_s) if real is None else _milliseconds(real)
    waits = f"{queued:>8} {first:>12} {expected:>10}"
    return f"{shown:<36} {state:<22} {waits} {lane.num_prompt_tokens:>8} {lane.num_decoded_tokens:>8}"


def _since(start_s: float | None, end_s: float | None) -> str:
    if start_s is None or end_s is None:
        return "–"
    return _milliseconds(1000 * max(0.0, end_s - start_s))


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    seconds = value / 1000
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
