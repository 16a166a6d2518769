"""Tokens of requests by the length of their bodies."""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.05
_FIRST_BYTES, _FIRST_TOKENS = 4096.0, 1024.0
LARGE_BYTES: Final = 16 << 10
"""Bodies from here on may be a picture in base64: a thumbnail has so much, a photo megabytes."""


class BodyTokens:
    """Learns from requests how many tokens the prompts of the next one have.

    Texts have about as many tokens to a byte in every request. A picture has some hundred tokens in a million bytes. So
    large bodies for a model that takes pictures have an average of their own, whatever their length, and do not change
    what is known of texts. Where that average is more than a text of the length would have, it is one of the texts.
    """

    def __init__(self) -> None:
        self.takes_pictures = False
        self._num_bytes, self._num_tokens = _FIRST_BYTES, _FIRST_TOKENS
        self._num_large_tokens: float | None = None

    def estimate(self, num_bytes: int | None) -> float:
        """Prompt tokens of a request of so many bytes; None: of unknown size."""
        per_byte = self._num_tokens / self._num_bytes
        usual = _FIRST_BYTES * per_byte
        if num_bytes is None:
            return usual
        if not self._is_large(num_bytes):
            return num_bytes * per_byte
        return min(usual if self._num_large_tokens is None else self._num_large_tokens, num_bytes * per_byte)

    def observe(self, num_bytes: int, num_tokens: int) -> None:
        """A request of so many bytes had so many prompt tokens."""
        if not self._is_large(num_bytes):
            self._num_bytes += SMOOTHING * (num_bytes - self._num_bytes)
            self._num_tokens += SMOOTHING * (num_tokens - self._num_tokens)
        elif self._num_large_tokens is None:
            self._num_large_tokens = float(num_tokens)
        else:
            self._num_large_tokens += SMOOTHING * (num_tokens - self._num_large_tokens)

    def _is_large(self, num_bytes: int) -> bool:
        return self.takes_pictures and num_bytes >= LARGE_BYTES
