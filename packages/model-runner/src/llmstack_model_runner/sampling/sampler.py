"""Sampler: one token per row of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.sampling.draws import draw, probabilities
from llmstack_model_runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from llmstack_model_runner.sampling.metadata import SamplingMetadata
from llmstack_model_runner.sampling.processing import GreedyChoice, ProcessedLogits, process_logits
from llmstack_types.vocabulary import LogprobsMode, words_of

ALL_MASKED = -2
"""In place of a token, where masks allow none."""


@dataclass(frozen=True, slots=True)
class HostTokens:
    """The chosen tokens as arrays of the host; for the attributes see `SamplerOutput`."""

    token_ids: npt.NDArray[np.int64]  # [num_rows]
    is_good: npt.NDArray[np.bool_]  # [num_rows]
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None

    def on_host(self) -> HostTokens:
        """Itself: a sampled output whose tokens are there already."""
        return self


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The chosen tokens, on the device.

    Attributes:
        is_good: False if no token can be chosen. The token id is then `ALL_MASKED` if the row's masks allow none, and
            else arbitrary, as where logits are NaN.
        logprob_rows: Rows of the logits that `logprobs` belongs to.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None

    def on_host(self) -> HostTokens:
        """The tokens in host memory; blocks until the device is done."""
        return HostTokens(self.token_ids.cpu().numpy(), self.is_good.cpu().numpy(), self.logprob_rows, self.logprobs)


class Sampler:
    """Samples all rows at once, without state between steps.

    The order is: bitmask, allowed tokens, masked tokens (`min_tokens`, bad words), logit bias, custom processors,
    penalties (repetition, frequency, presence), and forced tokens (the end of reasoning). Greedy rows then take the
    argmax. Random rows go on with temperature, argmax-invariant custom processors, min-p, typical-p, top-k, top-p and
    the draw.

    Of a beam the same stages change log-probabilities in place of logits, as in transformers. It reports what they make
    of them, so that its likeliest tokens are all allowed.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        """`logprobs_mode`: `raw_logprobs` of the model's logits, or `processed_logprobs` of the sampled distribution.

        Raises:
            ValueError: The mode is unknown.
        """
        known = words_of(LogprobsMode)
        if logprobs_mode not in known:
            raise ValueError(f"logprobs_mode {logprobs_mode[:64]!r} is unknown; use {' or '.join(known)}")
        self._is_raw = logprobs_mode == "raw_logprobs"

    def sample(
        self, logits: torch.Tensor, metadata: SamplingMetadata, greedy: GreedyChoice | None = None
    ) -> SamplerOutput:
        """Chooses a token per row.

        Args:
            logits: float32 [num_rows, vocab_size]; overwritten if the metadata changes logits.
            metadata: Parameters; rows are those of `logits`.
            greedy: The argmax of the logits, if it is known; overwritten.
        """
        logprob_rows, wanted = [row for row, _ in metadata.logprobs], metadata.logprob_token_ids
        beams = metadata.beams if metadata.has_changes else ()
        if beams:
            logits[beams] = logits[beams].log_softmax(dim=-1)
        raw = logits[logprob_rows] if logprob_rows and self._is_raw else None
        processed = process_logits(logits, metadata, greedy)
        token_ids = processed.token_ids
        if processed.random is not None:
            rows = torch.from_numpy(processed.random.rows).to(logits.device)
            token_ids[rows] = draw(processed.logits, processed.best, processed.random)
        if not logprob_rows:
            return SamplerOutput(_marked(token_ids, processed), processed.is_good)
        reported = _processed_logits(processed, logprob_rows) if raw is None else raw
        taken = [logprob_rows.index(row) for row in beams]
        if taken:
            reported[taken] = processed.logits[beams]
        logprobs = gather_logprobs(
            reported,
            token_ids[logprob_rows],
            [num_top for _, num_top in metadata.logprobs],
            {index: ids for index, row in enumerate(logprob_rows) if (ids := wanted.get(row)) is not None},
            taken,
        )
        return SamplerOutput(_marked(token_ids, processed), processed.is_good, tuple(logprob_rows), logprobs)


def _marked(token_ids: torch.Tensor, processed: ProcessedLogits) -> torch.Tensor:
    """The tokens, `ALL_MASKED` where none is allowed."""
    return token_ids if processed.is_all_masked is None else token_ids.masked_fill(processed.is_all_masked, ALL_MASKED)


def _processed_logits(processed: ProcessedLogits, rows: list[int]) -> torch.Tensor:
    """Logits whose softmax is the distribution that each row's token is sampled from, without sets if greedy."""
    logits = processed.logits[rows]
    if processed.random is None:
        return logits
    is_asked = np.isin(processed.random.rows, rows)
    random = processed.random.select(is_asked)
    if len(random.rows):
        index = torch.from_numpy(np.searchsorted(rows, random.rows)).to(logits.device)
        logits[index] = probabilities(processed.logits, processed.best, random).log_()
    return logits


def target_probabilities(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Probability of every token under each row's parameters: float32 [num_rows, vocab_size].

    The probabilities are those that the sampler draws from, after all stages. A greedy row has probability 1 at its
    argmax. A row from which no token can be drawn has NaN or arbitrary values.

    Args:
        logits: float32 [num_rows, vocab_size]; not changed.
        metadata: Parameters; rows are those of `logits`.
    """
    processed = process_logits(logits.clone() if metadata.has_changes else logits, metadata)
    result = torch.zeros_like(logits).scatter_(-1, processed.token_ids[:, None], 1.0)
    if processed.random is not None:
        rows = torch.from_numpy(processed.random.rows).to(logits.device)
        result[rows] = probabilities(processed.logits, processed.best, processed.random)
    return result
