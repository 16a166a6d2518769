"""How draft tokens are made."""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("ngram",)
MAX_NUM_SPECULATIVE_TOKENS = 64
MAX_PROMPT_LOOKUP = 32


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding under vLLM's names; constructing it checks them.

    Attributes:
        method: `ngram` looks the last tokens of a request up in the ones before.
        num_speculative_tokens: Most draft tokens of one row, 1 to 64.
        prompt_lookup_max: Longest n-gram that is looked up, at most 32 tokens.
        prompt_lookup_min: Shortest one; shorter ones find more and guess worse.

    Raises:
        ValueError: A field is out of range; the text names it.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method[:64]!r}")
        if not 1 <= self.num_speculative_tokens <= MAX_NUM_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be 1 to {MAX_NUM_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_PROMPT_LOOKUP:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) and prompt_lookup_max ({self.prompt_lookup_max}) "
                f"must lie in 1 to {MAX_PROMPT_LOOKUP}, the former not above the latter"
            )
