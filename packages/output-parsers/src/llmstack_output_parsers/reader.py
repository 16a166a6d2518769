"""The growing text of a message, read from front to back.

Each character is visited a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from llmstack_output_parsers.json_scanner import JsonScanner
from llmstack_output_parsers.json_writer import JsonWriter

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A part of the parsing: it yields when it needs more text, and returns its result."""

SPACES = " \t\r\n"
MAX_HELD_CHARS = 65_536
"""Maximum length of text that is held back, for a possible call or for a value to be converted."""


class Reader:
    """The text that has arrived and was not taken yet.

    Undecided text can be held: `release` returns the text taken since `hold`.

    Attributes:
        num_visited: Characters looked at so far; those looked at again count again.
    """

    def __init__(self) -> None:
        self.num_visited = 0
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._held: list[str] | None = None
        self._num_held = 0
        self._look_starts: list[int] = []

    def push(self, text: str) -> None:
        """Appends the next piece of text."""
        start = self._start
        self._text = self._text[start:] + text if start < len(self._text) else text
        self._position -= start
        self._look_starts = [place - start for place in self._look_starts]

    def end(self) -> None:
        """Marks the end of the text."""
        self._is_ended = True

    @property
    def is_ended(self) -> bool:
        """Whether the text is complete."""
        return self._is_ended

    def hold(self) -> None:
        """Keeps the text that is taken from now on."""
        self._held, self._num_held = [], 0

    def release(self) -> str:
        """The text taken since `hold`, which is no longer kept."""
        held = "".join(self._held or ())
        self._held, self._num_held = None, 0
        return held

    @property
    def room(self) -> int:
        """The number of characters that may still be held."""
        return MAX_HELD_CHARS - self._num_held

    @property
    def has_text(self) -> bool:
        """Whether text has come that was not taken yet."""
        return self._position < len(self._text)

    @property
    def is_at_end(self) -> bool:
        """Whether the text is complete, and all of it was taken."""
        return self._is_ended and not self.has_text

    @property
    def num_held_chars(self) -> int:
        """Characters that were not taken yet, or are held."""
        return len(self._text) - self._start + self._num_held

    @property
    def _start(self) -> int:
        """The first character that is still needed."""
        return self._look_starts[0] if self._look_starts else self._position

    def look_ahead(self, steps: Steps[Result]) -> Steps[Result]:
        """The result of `steps`, which may take a bounded number of characters; they are put back."""
        self._look_starts.append(self._position)
        result = yield from steps
        self._position = self._look_starts.pop()
        return result

    def take(self, num_chars: int) -> str:
        """The next characters, which must have arrived."""
        taken = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        if self._held is not None:
            self._held.append(taken)
            self._num_held += num_chars
        return taken

    def take_rest(self) -> str:
        """All text that has arrived."""
        return self.take(len(self._text) - self._position)

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._position >= len(self._text):
            if self._is_ended:
                return ""
            yield
        self.num_visited += 1
        return self._text[self._position]

    def ends_within(self, texts: Sequence[str]) -> bool:
        """Whether the text is complete, and what was not taken of it is the beginning of one of these texts."""
        rest = self._text[self._position :]
        return self._is_ended and any(text.startswith(rest) for text in texts)

    def take_spaces(self) -> Steps[str]:
        """Takes white space, as far as there is room to hold it, and returns the character after it."""
        while True:
            character = yield from self.peek()
            if not character or character not in SPACES or not self.room:
                return character
            self.take(1)

    def take_comma(self, closer: str) -> Steps[bool]:
        """True if another entry of a list may follow, whose comma is taken, or the closer of the list follows."""
        character = yield from self.take_spaces()
        if character == ",":
            self.take(1)
        return character in (",", closer)

    def take_if(self, literal: str) -> Steps[bool]:
        """Takes `literal` if the text continues with it."""
        while True:
            num_come = min(len(self._text) - self._position, len(literal))
            self.num_visited += num_come
            if not self._text.startswith(literal[:num_come], self._position):
                return False
            if num_come == len(literal):
                self.take(num_come)
                return True
            if self._is_ended:
                return False
            yield

    def take_while(self, allowed: frozenset[str], max_chars: int) -> Steps[str]:
        """Takes up to `max_chars` characters that are allowed."""
        pieces: list[str] = []
        while len(pieces) < max_chars:
            character = yield from self.peek()
            if character not in allowed:
                break
            pieces.append(self.take(1))
        return "".join(pieces)

    def take_json(self, scanner: JsonScanner, max_chars: int) -> Steps[str | None]:
        """The text of one JSON value; None if it is malformed, too long or incomplete."""
        pieces: list[str] = []
        while True:
            pieces.append(self.take_json_piece(scanner, max_chars))
            max_chars -= len(pieces[-1])
            if scanner.is_complete:
                return "".join(pieces)
            if scanner.is_broken or max_chars <= 0:
                return None
            if self._is_ended:
                return "".join(pieces) if scanner.end() else None
            yield

    def take_json_piece(self, scanner: JsonScanner | JsonWriter, max_chars: int | None = None) -> str:
        """The part of a JSON value that has arrived."""
        stop = len(self._text) if max_chars is None else min(len(self._text), self._position + max_chars)
        end = scanner.scan(self._text, self._position, stop)
        self.num_visited += end - self._position + 1
        return self.take(end - self._position)

    def take_until(self, markers: Sequence[str], max_chars: int | None = None) -> tuple[str, str]:
        """The text before the first marker, and the marker, which is taken; empty if there is none.

        A possible start of a marker at the end of the text is not taken, unless the text is complete.
        `markers`: All begin with the same character; none is a prefix of another.
        `max_chars`: No more is taken, and a marker behind so many characters is not found.
        """
        start, found = self._position, ""
        while not found and (start := self._text.find(markers[0][0], start)) >= 0:
            self.num_visited += sum(map(len, markers))
            found = next((marker for marker in markers if self._text.startswith(marker, start)), "")
            if found or self._may_begin(markers, start):
                break
            start += 1
        num_before = (start if start >= 0 else len(self._text)) - self._position
        if max_chars is not None and num_before >= max_chars:
            num_before, found = max_chars, ""
        before = self.take(num_before)
        self.num_visited += len(before)
        self.take(len(found))
        return before, found

    def _may_begin(self, markers: Sequence[str], start: int) -> bool:
        """Whether the text from `start` on may become a marker."""
        rest = self._text[start : start + max(map(len, markers))]
        is_cut = start + len(rest) == len(self._text)
        return is_cut and not self._is_ended and any(marker.startswith(rest) for marker in markers)

    def take_until_character(self, characters: str) -> tuple[str, str]:
        """The text before the first of the characters, and the character, which is taken."""
        text, start = self._text, self._position
        end = start
        while end < len(text) and text[end] not in characters:
            end += 1
        before = self.take(end - start)
        self.num_visited += len(before) + 1
        return before, self.take(1)


def without_cut_tag(text: str, tags: Sequence[str], min_chars: int = 2) -> str:
    """The last text up to the tag within which it ends, if that many characters of the tag have come.

    `tags`: All begin with the same character.
    """
    start = text.rfind(tags[0][0]) if tags else -1
    is_cut = 0 <= start <= len(text) - min_chars and any(tag.startswith(text[start:]) for tag in tags)
    return text[:start] if is_cut else text
