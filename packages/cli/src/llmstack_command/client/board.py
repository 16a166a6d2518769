"""The state that `llmstack top` draws, from the stream of `/live/events`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from llmstack_command.client.terminal import without_control_characters
from llmstack_command.errors import ApiError

# Steps over which rates are averaged, and finished requests that stay in sight.
MAX_STEPS = 512
MAX_REQUESTS = 4096
MAX_RUNS = 64
MAX_SENTENCES = 8
NUM_STEP_VALUES = 8  # after its number


@dataclass(slots=True)
class Lane:
    """One request.

    Attributes:
        arrived_s: When it began to wait.
        began_s: When it was given its first step, which may be one that the server no longer keeps.
        has_first_step: Whether that is among its runs.
        first_token_s: When the step ended that gave its first token.
        runs: First and last step, and whether it decoded; the last ones.
        waits: When it began to wait, and whether it had run before.
    """

    state: str = "running"
    arrived_s: float | None = None
    began_s: float | None = None
    has_first_step: bool = True
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_decoded_tokens: int = 0
    runs: deque[tuple[int, int, bool]] = field(default_factory=lambda: deque(maxlen=MAX_RUNS))
    waits: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_RUNS))

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state.startswith("finished")

    def note(self, state: str, time_s: float) -> None:
        """Notes that the request entered a state; events of a little before come again."""
        self.state = state
        is_lost = state in ("preempted", "swapped", "yielded")
        if self.arrived_s is None and state.startswith("waiting"):
            self.arrived_s = time_s
        if self.began_s is None and state == "running":
            self.began_s = time_s
        if (is_lost or state.startswith("waiting")) and (not self.waits or time_s > self.waits[-1][0]):
            self.waits.append((time_s, is_lost))


@dataclass(slots=True)
class Board:
    """Steps and requests of one engine core."""

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
        except (TypeError, ValueError, LookupError, AttributeError):
            raise ApiError("the stream has another form: is this a server of another version?") from None

    def _add(self, part: dict[str, Any]) -> None:
        core = str(part.get("core") or "")
        if self.core and core != self.core:  # after a crash or a reload the steps begin again
            self.steps, self.lanes = {}, {}
        self.core = core
        self.notes = [as_line(line) for line in _notes(part)]
        for step in part["steps"]:
            number, *values = step
            if len(values) != NUM_STEP_VALUES:
                raise ValueError(f"a step has {len(values)} values")
            self.steps[int(number)] = [number, *map(_number_or_none, values)]
        for name, time_s, state in part["events"]:
            self.lanes.setdefault(str(name), Lane()).note(str(state), float(time_s))
        for name, first, last, kind, num_tokens, *_ in part["runs"]:
            self._add_run(self.lanes.setdefault(str(name), Lane()), int(first), int(last), kind == "d", num_tokens)
        for name, *times in part.get("predictions", ()):
            self.predictions[str(name)] = [*map(_number_or_none, times)]
        _forget(self.steps, MAX_STEPS)
        _forget(self.lanes, MAX_REQUESTS)
        _forget(self.predictions, MAX_REQUESTS)

    def _add_run(self, lane: Lane, first: int, last: int, is_decode: bool, num_tokens: int) -> None:
        if not lane.runs and first in self.steps:
            first_s = self.steps[first][1]
            lane.has_first_step = lane.began_s is None or lane.began_s >= first_s
            lane.began_s = lane.began_s or first_s
        lane.runs.append((first, last, is_decode))
        if is_decode:
            lane.num_decoded_tokens += num_tokens
            # The last chunk of a prompt gives the first token; a prompt of one uncached token looks like a decode.
            at = first if lane.num_prompt_tokens == 0 else first - 1
            if lane.has_first_step and lane.first_token_s is None and at in self.steps:
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
        waiting = "" if num_waiting is None else f", {num_waiting} waiting"
        blocks = "" if used is None else f", {used} of {num_blocks} KV blocks"
        speed = f", {num_tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        return f"step {number}: {num_running} running{waiting}{blocks}{speed}, {milliseconds:.1f} ms per step"

    def ordered(self) -> tuple[list[tuple[str, Lane]], list[tuple[str, Lane]]]:
        """The requests that are not over, oldest first, and those that ended, last first."""
        living = [pair for pair in self.lanes.items() if not pair[1].is_over]
        return living, [pair for pair in reversed(self.lanes.items()) if pair[1].is_over]

    def prediction_of(self, name: str) -> list[Any]:
        """The predicted and the real milliseconds to its first token; of several answers that of their request."""
        return self.predictions.get(name) or self.predictions.get(name.partition("_")[2]) or [None, None]


def as_line(text: str) -> str:
    """The text as one line that a terminal may show."""
    return without_control_characters(" ".join(text.split("\n"))).replace("\t", " ")


def _forget(named: dict[Any, Any], max_num_kept: int) -> None:
    for name in list(named)[:-max_num_kept]:
        del named[name]


def _notes(part: dict[str, Any]) -> list[str]:
    """The weights that answer, and what a shadow scheduler would have changed."""
    lines = []
    gap = part.get("gap")
    if gap and gap["reason"] == "steps_forgotten":
        after, following = int(gap["after"]), gap["next"]
        lines.append(
            f"steps after {after} are missing" if following is None
            else f"steps {after + 1} to {int(following) - 1} are missing"
        )  # fmt: skip
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
