"""Ends of an answer at its lines: by their indentation, and by time."""

from __future__ import annotations

from typing import Final

_BLANKS: Final = " \t"


class LineLimits:
    """Ends the text that an editor asks for where llama.cpp's server does.

    Attributes:
        is_over: Whether a limit has ended the text.
    """

    def __init__(self, min_indent: int, max_ms: float) -> None:
        """0 or less is no limit.

        `min_indent`: Blanks and tabs with which each line but the first one begins; an empty line has none.
        `max_ms`: Of the text, from its first token on; the first end of a line after that is the end of the text.
        """
        self.is_over = False
        self._min_indent, self._max_ms = min_indent, max_ms
        self._indent: int | None = None  # of a line that has only blanks so far; not of the first one

    def take(self, text: str, elapsed_ms: float) -> str:
        """The part of a new piece that belongs to the text; its first token came `elapsed_ms` ago."""
        if self._min_indent > 0:
            text = self._indented(text)
        if 0 < self._max_ms < elapsed_ms and "\n" in text:
            self.is_over = True
        return text

    def _indented(self, text: str) -> str:
        for place, character in enumerate(text):
            if self._indent is not None:
                if character in _BLANKS:
                    self._indent += 1
                    continue
                if self._indent < self._min_indent:
                    self.is_over = True
                    return text[:place]
                self._indent = None
            if character == "\n":
                self._indent = 0
        return text
