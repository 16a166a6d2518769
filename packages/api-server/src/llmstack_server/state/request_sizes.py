"""Tokens of requests by the length of their bodies."""

from __future__ import annotations

import math
from typing import Final

SMOOTHING: Final = 0.05
LARGE_BYTES: Final = 16 << 10
"""Bodies from here on may be a picture in base64: a thumbnail has so much, a photo megabytes."""
_FIRST_BYTES, _FIRST_TOKENS, _FIRST_OUTPUT_TOKENS = 4096.0, 1024.0, 256.0


class RequestSizes:
    """Learns from requests how many tokens the next one has.

    Texts have about as many tokens to a byte in every request. A picture has some hundred tokens in a million bytes. So
    large bodies for a model that takes pictures have an average of their own, whatever their length, and do not change
    what is known of texts. Where that average is more than a text of the length would have, it is one of the texts.

    Attributes:
        num_output_tokens: Of a request, as far as the queue counts them.
    """

    def __init__(self) -> None:
        self.num_output_tokens = _FIRST_OUTPUT_TOKENS
        self._num_bytes, self._num_tokens = _FIRST_BYTES, _FIRST_TOKENS
        self._large_bytes = math.inf
        self._num_large_tokens: float | None = None

    def set_model(self, *, takes_pictures: bool) -> None:
        """A model is served from now on."""
        self._large_bytes = LARGE_BYTES if takes_pictures else math.inf

    def estimate(self, num_bytes: int | None) -> int:
        """The expected tokens of a request, its output included, for a body of `num_bytes`; None is an unknown size."""
        per_byte = self._num_tokens / self._num_bytes
        usual = _FIRST_BYTES * per_byte
        if num_bytes is None:
            num_tokens = usual
        elif num_bytes < self._large_bytes:
            num_tokens = num_bytes * per_byte
        else:
            large = usual if self._num_large_tokens is None else self._num_large_tokens
            num_tokens = min(large, num_bytes * per_byte)
        return int(num_tokens + self.num_output_tokens) + 1

    def observe(self, num_bytes: int | None, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learns from a request whose tokens are known; `num_bytes` is None for a body of unknown size."""
        self.num_output_tokens += SMOOTHING * (num_output_tokens - self.num_output_tokens)
        if num_bytes is None:
            return
        if num_bytes < self._large_bytes:
            self._num_bytes += SMOOTHING * (num_bytes - self._num_bytes)
            self._num_tokens += SMOOTHING * (num_prompt_tokens - self._num_tokens)
        elif self._num_large_tokens is None:
            self._num_large_tokens = float(num_prompt_tokens)
        else:
            self._num_large_tokens += SMOOTHING * (num_prompt_tokens - self._num_large_tokens)
