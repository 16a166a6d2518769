"""How the tokens of one batch are chosen: the rows' parameters gathered for the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.bitmask import TokenBitmask
from llmstack_model_runner.sampling.logit_masks import LogitBias, TokenEntries
from llmstack_model_runner.sampling.logits_processor import LogitsProcessors, LogitsRows
from llmstack_model_runner.sampling.penalties import Penalties


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that are drawn at random; parallel arrays.

    Attributes:
        rows: Rows of the logits.
        top_k: At least 1; the vocabulary size where off.
        output_indices: How many tokens each request has generated before this one.
    """

    rows: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    typical_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    output_indices: npt.NDArray[np.int64]

    def select(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> RandomRows:
        """The chosen ones of these rows."""
        return RandomRows(*[getattr(self, field.name)[index] for field in fields(self)])

    def at_temperature_one(self) -> RandomRows:
        """The same for logits that were divided by their temperature already."""
        return replace(self, temperature=np.ones_like(self.temperature))


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the sampler does to each row of the logits; rows not named anywhere are greedy and untouched.

    Attributes:
        random: None when all rows are greedy.
        barred: Tokens before `min_tokens`, and bad words.
        logprobs: (row, number of most likely tokens) of rows that report log-probabilities.
        processors: Custom ones, told of all rows.
        processor_rows: What the rows of the logits are to them; None where there are none.
    """

    random: RandomRows | None = None
    bitmask: TokenBitmask | None = None
    allowed: TokenEntries | None = None
    barred: TokenEntries | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    logprobs: Sequence[tuple[int, int]] = ()
    processors: LogitsProcessors | None = None
    processor_rows: LogitsRows | None = None

    @property
    def has_masks(self) -> bool:
        """True when something may be hidden by what is done to the logits."""
        masks = (self.bitmask, self.allowed, self.barred, self.processor_rows)
        return any(mask is not None for mask in masks)

    @property
    def has_changes(self) -> bool:
        """True when some logits are changed before a token is chosen."""
        return self.has_masks or self.bias is not None or self.penalties is not None
