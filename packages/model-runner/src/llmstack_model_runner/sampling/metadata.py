"""How the tokens of one batch are chosen: the rows' parameters gathered for the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import TokenIds
from llmstack_model_runner.sampling.penalties import PenaltyRow


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
    seeds: npt.NDArray[np.uint64]
    output_indices: npt.NDArray[np.int64]

    def select(self, index: npt.NDArray[np.bool_]) -> RandomRows:
        """The chosen ones of these rows."""
        return RandomRows(
            self.rows[index],
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seeds[index],
            self.output_indices[index],
        )


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the sampler does to each row of the logits; rows not named anywhere are greedy and untouched.

    Attributes:
        random: None when all rows are greedy.
        allowed_token_ids: (row, distinct token ids) of rows that may take these only.
        logit_bias: (row, distinct token ids, values).
        barred_token_ids: (row, token ids) of rows that have not reached `min_tokens`.
        logprobs: (row, number of most likely tokens) of rows that report log-probabilities.
    """

    random: RandomRows | None = None
    allowed_token_ids: Sequence[tuple[int, TokenIds]] = ()
    logit_bias: Sequence[tuple[int, TokenIds, npt.NDArray[np.float32]]] = ()
    barred_token_ids: Sequence[tuple[int, TokenIds]] = ()
    penalties: Sequence[PenaltyRow] = field(default=())
    logprobs: Sequence[tuple[int, int]] = ()

    @property
    def has_changes(self) -> bool:
        """True when some logits are changed before a token is chosen."""
        return bool(self.allowed_token_ids or self.logit_bias or self.barred_token_ids or self.penalties)
