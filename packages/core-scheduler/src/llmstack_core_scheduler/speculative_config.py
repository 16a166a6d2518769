"""Settings of drafts: the method, the number and the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_METHODS_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "dflash")
MODEL_METHODS = (*_METHODS_WITH_MODEL, "mtp")
"""Methods by which the model runner makes the drafts; the scheduler says how many."""
METHODS = ("ngram", "suffix", *MODEL_METHODS)
MAX_NUM_SPECULATIVE_TOKENS = 64
MAX_PROMPT_LOOKUP = 32
MAX_TREE_DEPTH = 256
MAX_NUM_CACHED_ANSWERS = 1 << 20


def check_integers(config: object, names: Iterable[str], least: int) -> None:
    """Checks that fields of a configuration are integers of at least `least`.

    Raises:
        ValueError: One is not; the text names it.
    """
    for name in names:
        value = getattr(config, name)
        if not hasattr(value, "__index__"):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding under vLLM's names; constructing it checks them.

    Attributes:
        method: `ngram` looks the last tokens of a request up in the ones before, `suffix` in earlier answers too;
            `draft_model` asks a smaller model, `mtp` the layer of the served model's checkpoint that guesses a further
            token; `eagle`, `eagle3`, `medusa` and `dflash` ask heads over its hidden states.
        num_speculative_tokens: Most draft tokens of one row, 1 to 64.
        prompt_lookup_max: Longest n-gram that is looked up, at most 32 tokens.
        prompt_lookup_min: Shortest one; shorter ones find more and guess worse.
        suffix_decoding_max_tree_depth: Most tokens of a match and its drafts together, 3 to 256.
        suffix_decoding_max_cached_requests: Finished answers that are kept; 0 keeps none.
        suffix_decoding_max_spec_factor: Most drafts for each token of the match.
        suffix_decoding_min_token_prob: Least chance that a draft and those before it are right, by the counts.
        is_adaptive: Whether a row has as many drafts as are expected to repay their cost, by how often the request's
            drafts were right so far, and none in a step of more than `max_num_step_tokens`.
        token_cost: The time that one more token adds to a step, over the time of a step of one token. A constant, so
            that decisions depend on no clock.
        max_num_step_tokens: Most tokens of a step with drafts, if they are adaptive.
        needs_equal_bits: Whether there are drafts only where a row has the same bits in every batch.
        model: The draft model, by name or folder; empty for a method without one.
        variant: The native variant whose measured costs count in place of `token_cost`, as `draft_costs` names it, with
            weights of few bits apart. The engine core sets it.
        step_bytes: Bytes of weights that a step reads, by which the measured costs of two models are joined; 0 where
            unknown. The engine core sets it where it is 0.
        draft_cost: The time that a model takes to make one more draft of every row, over the time of a step of one
            token. The engine core sets it from the sizes of both models.

    Raises:
        ValueError: A field is out of range; the text names it.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    is_adaptive: bool = False
    token_cost: float = 0.125
    max_num_step_tokens: int = 32
    needs_equal_bits: bool = False
    model: str = ""
    variant: str = ""
    step_bytes: int = 0
    draft_cost: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method[:64]!r}")
        if (self.method in _METHODS_WITH_MODEL) != bool(self.model):
            raise ValueError(
                f"model must be given with the methods {', '.join(_METHODS_WITH_MODEL)} and no other, got "
                f"{self.model[:64]!r} with {self.method!r}"
            )
        check_integers(self, ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"), 1)
        check_integers(self, ("max_num_step_tokens",), 2)
        check_integers(self, ("step_bytes",), 0)
        if self.num_speculative_tokens > MAX_NUM_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be 1 to {MAX_NUM_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}"
            )
        if not self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_PROMPT_LOOKUP:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) and prompt_lookup_max ({self.prompt_lookup_max}) "
                f"must lie in 1 to {MAX_PROMPT_LOOKUP}, the former not above the latter"
            )
        self._check_suffixes()
        if not 0.0 < self.token_cost <= 1.0:
            raise ValueError(f"token_cost must be above 0 and at most 1, got {self.token_cost}")
        if not self.draft_cost >= 0.0:
            raise ValueError(f"draft_cost must be at least 0, got {self.draft_cost}")

    def _check_suffixes(self) -> None:
        limits = (("max_tree_depth", 3, MAX_TREE_DEPTH), ("max_cached_requests", 0, MAX_NUM_CACHED_ANSWERS),
                  ("max_spec_factor", 0.0, MAX_TREE_DEPTH), ("min_token_prob", 0.0, 1.0))  # fmt: skip
        check_integers(self, (f"suffix_decoding_{name}" for name, _, _ in limits[:2]), 0)
        for name, least, most in limits:
            value = getattr(self, f"suffix_decoding_{name}")
            if not least <= value <= most:
                raise ValueError(f"suffix_decoding_{name} must be {least} to {most}, got {value}")

    @property
    def is_by_model(self) -> bool:
        """Whether the model runner makes the drafts."""
        return self.method in MODEL_METHODS
