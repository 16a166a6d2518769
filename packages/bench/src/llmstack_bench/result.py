"""Measurements of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestResult:
    """One request as its client measured it; a failed one keeps the data received until then.

    Attributes:
        start_s: When it was sent, in seconds since the run began.
        lag_s: Delay behind the planned send time, caused by the load generator.
        ttft_s: Time to the first token; None if there was none.
        e2e_s: Time to the last token, or to the failure.
        token_gaps_s: Time between tokens. A chunk that the server counts as several tokens gives equal gaps.
        num_chunks: Chunks that held tokens.
        num_prompt_tokens: As the server counted them; None without usage.
        num_output_tokens: As the server counted them, else `num_chunks`.
        has_usage: Whether the server counted.
        error: The reason of a failure; None for a complete answer.
        num_cached_tokens: Of the prompt, found in the server's cache, as it counted them; None without that count.
        turn: The turn of a session, from 1 on; None of a request alone.
        texts: The pieces of the answer, where they were asked for.
        predicted_ttft_s: What the server said in `x-llmstack-predicted-ttft-ms`; None without that header.
    """

    start_s: float = 0.0
    lag_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    token_gaps_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    has_usage: bool = False
    error: str | None = None
    predicted_ttft_s: float | None = None
    num_cached_tokens: int | None = None
    turn: int | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """The record that `--save-detailed` writes."""
        record = {name: getattr(self, name) for name in self.__slots__ if name != "texts"}
        return record | {"tpot_s": self.tpot_s}
