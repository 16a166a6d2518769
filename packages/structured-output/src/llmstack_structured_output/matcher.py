"""Where one text stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class Matcher:
    """The tokens of one text so far, and what may follow. Used by one thread at a time.

    Attributes:
        handle: The library's own object.
        num_tokens: Tokens accepted.
    """

    __slots__ = ("handle", "num_tokens")

    def __init__(self, handle: LLMatcher) -> None:
        self.handle = handle
        self.num_tokens = 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Takes tokens over; False where one was not allowed, after which nothing is."""
        self.num_tokens += len(token_ids)
        return bool(self.handle.consume_tokens(list(token_ids)))

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back; the end of the text too.

        Raises:
            ValueError: There are not as many, or the matcher has failed.
        """
        if not 0 <= num_tokens <= self.num_tokens or not self.handle.rollback(num_tokens):
            raise ValueError(f"{num_tokens} of {self.num_tokens} tokens cannot be taken back")
        self.num_tokens -= num_tokens

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow one after the other; takes none over."""
        return int(self.handle.validate_tokens(list(token_ids)))

    def mask(self) -> bytes:
        """One bit per token, 1 where it may come next: token t is bit t % 8, from the lowest on, of byte t // 8."""
        return bytes(self.handle.compute_bitmask())

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self.handle.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow, or the matcher has failed."""
        return bool(self.handle.is_stopped())

    @property
    def error(self) -> str:
        """Why the matcher has failed; empty while it has not."""
        return str(self.handle.get_error())
