"""Markdown of a model on a terminal, styled while it streams."""

from __future__ import annotations

_BOLD, _NOT_BOLD = "\x1b[1m", "\x1b[22m"
_CODE, _NOT_CODE = "\x1b[36m", "\x1b[39m"
RESET = "\x1b[0m"
_MARKS = "*`#"


class MarkdownStyle:
    """Styles strong text, headings and code. Marks stay where they may be meant; nothing waits for a line's end."""

    def __init__(self) -> None:
        self._pending = ""  # marks whose number is not known yet
        self._is_bold = False
        self._is_code = False
        self._is_block = False
        self._is_heading = False
        self._is_line_start = True

    def add(self, text: str) -> str:
        """The next piece with its styles; a mark at its end comes with the next piece."""
        shown = []
        for char in text:
            if self._pending and char != self._pending[0]:
                shown.append(self._end_marks(char))
            if char in _MARKS:
                self._pending += char
                continue
            if char == "\n":
                shown.append(self._end_line())
            shown.append(char)
            self._is_line_start = char == "\n"
        return "".join(shown)

    def end(self) -> str:
        """The marks that are left, and the end of all styles."""
        return self._end_marks("\n") + (RESET if self._is_bold or self._is_code or self._is_heading else "")

    def _end_line(self) -> str:
        if not self._is_heading:
            return ""
        self._is_heading = False
        return _NOT_BOLD

    def _end_marks(self, following: str) -> str:
        marks, self._pending = self._pending, ""
        at_start, self._is_line_start = self._is_line_start, False
        if marks == "```" and at_start:
            self._is_block = not self._is_block
            self._is_code = self._is_block
            return (_CODE + marks) if self._is_block else (marks + _NOT_CODE)
        if self._is_block or not marks:
            return marks
        if marks == "`":
            self._is_code = not self._is_code
            return _CODE if self._is_code else _NOT_CODE
        if marks == "**" and not self._is_code:
            self._is_bold = not self._is_bold
            return _BOLD if self._is_bold else _NOT_BOLD
        if marks[0] == "#" and at_start and following == " ":
            self._is_heading = True
            return _BOLD + marks
        return marks
