"""What a parser of model output is, by shape."""

from __future__ import annotations

from typing import Protocol

from llmstack_output_parsers.deltas import ParsedDelta


class OutputParser(Protocol):
    """Parses the text of one message as it grows; never raises, whatever the model says.

    However a text is cut into pieces, what the deltas add up to is the same.
    """

    def feed(self, text: str) -> ParsedDelta:
        """What this piece settles. Linear in its length, amortised."""
        ...

    def finish(self) -> ParsedDelta:
        """What was held back. To be called once, after the last piece."""
        ...
