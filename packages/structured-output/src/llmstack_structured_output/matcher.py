"""Position of one text in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class Matcher:
    """The tokens of one text so far, and what may follow. Used by one thread at a time.

    Attributes:
        handle: The library's own object.
        num_tokens: Tokens accepted.
    """

    __slots__ = ("_eos_token_ids", "_num_past_end", "handle", "num_tokens")

    def __init__(self, handle: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.handle = handle
        self._eos_token_ids = eos_token_ids
        self.num_tokens = 0
        self._num_past_end = 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Takes tokens over; False where one was not allowed, after which nothing is."""
        consumed = self.handle.try_consume_tokens(list(token_ids))
        self.num_tokens += len(token_ids)
        rest = token_ids[consumed:]
        if not rest:
            return True
        if self.is_finished and not self.handle.is_error() and self._eos_token_ids.issuperset(rest):
            self._num_past_end += len(rest)  # the library takes nothing over behind the end, not even that
            return True
        return bool(self.handle.consume_token(rest[0]))  # False, and it has failed for good

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back; the end of the text too.

        Raises:
            ValueError: There are not as many, or the matcher has failed.
        """
        num_past_end = min(num_tokens, self._num_past_end)
        if not 0 <= num_tokens <= self.num_tokens or not self.handle.rollback(num_tokens - num_past_end):
            raise ValueError(f"{num_tokens} of {self.num_tokens} tokens cannot be taken back")
        self.num_tokens -= num_tokens
        self._num_past_end -= num_past_end

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens that could follow one after the other; takes none over."""
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
