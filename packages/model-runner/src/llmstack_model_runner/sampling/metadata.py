"""Sampling metadata: the parameters of one batch, gathered for the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.bitmask import TokenBitmask
from llmstack_model_runner.sampling.logit_masks import LogitBias, TokenEntries
from llmstack_model_runner.sampling.logits_processor import LogitsProcessors, LogitsRows
from llmstack_model_runner.sampling.penalties import Penalties
from llmstack_types import SamplingParams


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of the rows that are drawn at random; parallel arrays. Names of `SamplingParams` mean the same here.

    Attributes:
        rows: Rows of the logits.
        top_k: At least 1; the vocabulary size if disabled.
        infill_rules: An `InfillRule` of each row with `infill`; None of the others.
        output_indices: Number of tokens that each request has generated before this one.
    """

    rows: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    typical_p: npt.NDArray[np.float64]
    top_n_sigma: npt.NDArray[np.float64]
    infill_rules: npt.NDArray[np.object_]
    seeds: npt.NDArray[np.uint64]
    output_indices: npt.NDArray[np.int64]

    def select(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> RandomRows:
        """The parameters of some of these rows."""
        return RandomRows(*[getattr(self, one.name)[index] for one in fields(self)])

    def without_limits(self, index: npt.NDArray[np.int64], vocab_size: int) -> RandomRows:
        """The same parameters, with min-p, top-k and top-p off for the rows at `index`."""
        top_k, top_p, min_p = self.top_k.copy(), self.top_p.copy(), self.min_p.copy()
        top_k[index], top_p[index], min_p[index] = vocab_size, 1.0, 0.0
        return replace(self, top_k=top_k, top_p=top_p, min_p=min_p)

    def at_temperature_one(self) -> RandomRows:
        """The same parameters for logits that are already divided by their temperature."""
        return replace(self, temperature=np.ones_like(self.temperature))


RANDOM_PARAMETERS: Mapping[str, type[np.generic]] = {
    name: get_args(get_args(hint)[1])[0]
    for name, hint in get_type_hints(RandomRows).items()
    if name in {one.name for one in fields(SamplingParams)}
}
"""Fields that are parameters of a request, with the types of their arrays."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Parameters of the sampler for each row of the logits. Rows without any are greedy and unchanged.

    Attributes:
        random: Parameters of random rows; None if all rows are greedy.
        masked_tokens: End tokens before `min_tokens`, last tokens of bad words, and of repeated sequences.
        logprobs: (row, number of most likely tokens) of rows that report log-probabilities.
        logprob_token_ids: Tokens that a row reports in place of the most likely ones.
        forced: The only tokens that their rows may get.
        beams: Rows of beams, which report log-probabilities.
        processors: Custom logits processors, notified of all rows.
        processor_rows: Requests of the logits' rows, for the processors; None if there are no processors.
    """

    random: RandomRows | None = None
    bitmask: TokenBitmask | None = None
    allowed: TokenEntries | None = None
    masked_tokens: TokenEntries | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    logprobs: Sequence[tuple[int, int]] = ()
    logprob_token_ids: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    forced: TokenEntries | None = None
    beams: Sequence[int] = ()
    processors: LogitsProcessors | None = None
    processor_rows: LogitsRows | None = None

    @property
    def has_masks(self) -> bool:
        """Whether some tokens may be masked."""
        masks = (self.bitmask, self.allowed, self.masked_tokens, self.forced, self.processor_rows)
        return any(mask is not None for mask in masks)

    @property
    def has_changes(self) -> bool:
        """Whether some logits are changed before a token is chosen."""
        return self.has_masks or self.bias is not None or self.penalties is not None
