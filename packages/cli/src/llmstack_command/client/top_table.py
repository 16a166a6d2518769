"""The table of `llmstack top`: as many columns and rows as a terminal has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from llmstack_command.client.board import Board, Lane, as_line

MIN_LANE, MAX_NAME, MIN_NAME = 20, 40, 12
MAX_LANE_STEPS = 256
_COLUMNS: Final = (("QUEUED", 8), ("FIRST", 8), ("PREDICTED", 9), ("PROMPT", 7), ("DECODED", 7))
_STATE_WIDTH: Final = 14
_PLAIN, _BOLD, _DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
_KIND_TO_COLOR: Final = {"w": _DIM, "p": "\x1b[33m", "d": "\x1b[34m", "x": "\x1b[31m"}


@dataclass(frozen=True, slots=True)
class Style:
    """The means of a terminal: colours and characters.

    Attributes:
        has_color: Whether it gets colours.
        has_unicode: Whether it gets characters beyond ASCII.
    """

    has_color: bool = False
    has_unicode: bool = True

    @property
    def dash(self) -> str:
        """The sign for a missing value."""
        return "–" if self.has_unicode else "-"

    def bar(self, kind: str) -> str:
        """One cell of a lane: `w`aiting, `p`refill, `d`ecode, `x` preempted, or nothing."""
        return dict(zip("wpdx ", "·▒━╌ " if self.has_unicode else ".P=x ", strict=True))[kind]

    def shorten(self, text: str, width: int) -> str:
        """The text in at most `width` characters."""
        return text if len(text) <= width else text[: width - 1] + ("…" if self.has_unicode else "~")

    def painted(self, text: str, color: str) -> str:
        """The text in a colour, where there are colours."""
        return f"{color}{text}{_PLAIN}" if self.has_color and text.strip() else text


def top_lines(boards: Mapping[int, Board], width: int, height: int, style: Style) -> list[str]:
    """Summaries, notes and a table, in `height` lines at most.

    Requests that are not over are first, then those that ended last. Notes leave them half of the lines.
    """
    living, ended = [], []
    for index, board in sorted(boards.items()):
        alive, over = board.ordered()
        living += [(index, board, *pair) for pair in alive]
        ended += [(index, board, *pair) for pair in over]
    num_lines = height - 2 - min(len(living) + len(ended), height // 2)
    lines = _heading(boards, width, num_lines, style)
    num_steps = max((len(board.steps) for board in boards.values()), default=0)
    layout = _Layout(width, style, num_steps, len(boards) > 1)
    rows = [*living, *ended][: max(0, height - len(lines) - 2)]
    table = [layout.row(*row) for row in rows]
    return [*lines, "", style.painted(layout.header(), _BOLD), *table][: max(1, height)]


def _heading(boards: Mapping[int, Board], width: int, num_lines: int, style: Style) -> list[str]:
    """All summaries, and as many notes below them as there are lines; the first board's are first."""
    lines, num_notes = [], num_lines - len(boards)
    for index, board in sorted(boards.items()):
        title = f"engine core {index}: {board.summary()}" if len(boards) > 1 else board.summary()
        lines.append(style.painted(style.shorten(title, width), _BOLD))
        notes = board.notes[: max(0, num_notes)]
        lines += [style.shorten(note, width) for note in notes]
        num_notes -= len(notes)
    return lines


class _Layout:
    """The columns that fit: names shrink first, then a lane is drawn in what is left, then columns are left out."""

    def __init__(self, width: int, style: Style, num_steps: int, has_engines: bool) -> None:
        self._style, self._has_engines = style, has_engines
        self._columns = list(_COLUMNS)
        while self._columns and self._fixed() + MIN_NAME > width:
            self._columns.pop()
        self._name_width = max(MIN_NAME, min(MAX_NAME, width - self._fixed()))
        rest = width - self._fixed() - self._name_width - 1
        self._lane_width = rest if rest >= MIN_LANE else 0
        self._num_steps = max(self._lane_width, min(MAX_LANE_STEPS, num_steps))
        self._width = width

    def _fixed(self) -> int:
        """The width of all columns but the name."""
        return (3 if self._has_engines else 0) + 1 + _STATE_WIDTH + sum(width + 1 for _, width in self._columns)

    def header(self) -> str:
        """The names of the columns."""
        engine = "E  " if self._has_engines else ""
        named = f"{engine}{'REQUEST':<{self._name_width}} {'STATE':<{_STATE_WIDTH}}"
        columns = "".join(f" {name:>{width}}" for name, width in self._columns)
        lane = f" LAST {self._num_steps} STEPS" if self._lane_width else ""
        return (named + columns + lane)[: self._width]

    def row(self, engine: int, board: Board, name: str, lane: Lane) -> str:
        """The line of a request, with its lane."""
        style = self._style
        state = lane.state.removeprefix("finished_").replace("_", " ")
        predicted, real = board.prediction_of(name)
        first = self._since(lane.arrived_s, lane.first_token_s) if real is None else self._milliseconds(real)
        values = [
            self._since(lane.arrived_s, lane.began_s), first, self._milliseconds(predicted),
            str(lane.num_prompt_tokens), str(lane.num_decoded_tokens),
        ]  # fmt: skip
        shown = style.shorten(as_line(name), self._name_width)
        prefix = f"{engine:<3}" if self._has_engines else ""
        text = f"{prefix}{shown:<{self._name_width}} {style.shorten(as_line(state), _STATE_WIDTH):<{_STATE_WIDTH}}"
        text += "".join(f" {value:>{width}}" for value, (_, width) in zip(values, self._columns, strict=False))
        text = style.painted(text[: self._width], _DIM) if lane.is_over else text[: self._width]
        return text + (" " + self._bars(board, lane) if self._lane_width else "")

    def _bars(self, board: Board, lane: Lane) -> str:
        """The last steps, several to a cell; what lasted shortest is drawn over the rest."""
        cells = [" "] * self._lane_width
        if not board.steps:
            return ""
        last = next(reversed(board.steps))
        first = last - self._num_steps + 1
        scale = self._lane_width / self._num_steps

        def fill(begin: int, end: int, kind: str) -> None:
            for cell in range(int(max(0, begin - first) * scale), int((end - first) * scale) + 1):
                if 0 <= cell < len(cells) and (cells[cell] in " wd" or kind in "px"):
                    cells[cell] = kind

        for begin, end, is_decode in lane.runs:
            if end >= first:
                fill(begin, end, "d" if is_decode else "p")
        for time_s, is_lost in lane.waits:
            begin = next((number for number, step in board.steps.items() if step[1] >= time_s), last)
            end = min((run[0] - 1 for run in lane.runs if run[1] >= begin), default=begin if lane.is_over else last)
            if end >= max(begin, first):
                fill(begin, end, "x" if is_lost else "w")
        painted = []
        for kind, group in groupby(cells):
            painted.append(self._style.painted(self._style.bar(kind) * len(list(group)), _KIND_TO_COLOR.get(kind, "")))
        return "".join(painted).rstrip()

    def _since(self, start_s: float | None, end_s: float | None) -> str:
        if start_s is None or end_s is None:
            return self._style.dash
        return self._milliseconds(1000 * max(0.0, end_s - start_s))

    def _milliseconds(self, value: float | None) -> str:
        if value is None:
            return self._style.dash
        return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"
