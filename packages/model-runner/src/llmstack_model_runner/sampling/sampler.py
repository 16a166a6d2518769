"""Chooses one token per row of the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from llmstack_model_runner.sampling.draws import draw, probabilities
from llmstack_model_runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from llmstack_model_runner.sampling.metadata import SamplingMetadata
from llmstack_model_runner.sampling.processing import ProcessedLogits, process_logits

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The chosen tokens, on the device.

    Attributes:
        is_good: False where no token can be chosen: logits that are not numbers, or no token allowed. The token
            id means nothing there.
        logprob_rows: The rows that `logprobs` is about.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None

    def on_host(self) -> SamplerOutput:
        """The tokens where the host can read them; waits for the device."""
        return replace(self, token_ids=self.token_ids.cpu(), is_good=self.is_good.cpu())


class Sampler:
    """All rows at once; keeps nothing from step to step.

    The order is: bitmask, allowed tokens, barred tokens (`min_tokens`, bad words), logit bias, custom processors,
    penalties (repetition, frequency, presence), then greedy choice; or temperature, custom processors that keep the
    most likely token, min-p, typical-p, top-k, top-p and the draw.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        """`logprobs_mode`: Log-probabilities are those of the logits before all of it, or after all of it.

        Raises:
            ValueError: It is neither `raw_logprobs` nor `processed_logprobs`.
        """
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode {logprobs_mode[:64]!r} is unknown; use {' or '.join(LOGPROBS_MODES)}")
        self._is_raw = logprobs_mode == "raw_logprobs"

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Chooses a token per row.

        Args:
            logits: float32 [num_rows, vocab_size]; overwritten where the metadata changes logits.
            metadata: Names rows of `logits`.
        """
        logprob_rows = [row for row, _ in metadata.logprobs]
        raw = logits[logprob_rows] if logprob_rows and self._is_raw else None
        processed = process_logits(logits, metadata)
        token_ids = processed.token_ids
        if processed.random is not None:
            rows = torch.from_numpy(processed.random.rows).to(logits.device)
            token_ids[rows] = draw(processed.logits, processed.best, processed.random)
        if not logprob_rows:
            return SamplerOutput(token_ids, processed.is_good)
        logprobs = gather_logprobs(
            _processed_logits(processed, logprob_rows) if raw is None else raw,
            token_ids[logprob_rows],
            [num_top for _, num_top in metadata.logprobs],
        )
        return SamplerOutput(token_ids, processed.is_good, tuple(logprob_rows), logprobs)


def _processed_logits(processed: ProcessedLogits, rows: list[int]) -> torch.Tensor:
    """Logits whose log-softmax is the logarithm of what each row's token was chosen by; greedy rows have no sets."""
    logits = processed.logits[rows]
    if processed.random is None:
        return logits
    is_asked = np.isin(processed.random.rows, rows)
    random = processed.random.select(is_asked)
    if len(random.rows):
        index = torch.from_numpy(np.searchsorted(rows, random.rows)).to(logits.device)
        logits[index] = probabilities(processed.logits, processed.best, random).log_()
    return logits
