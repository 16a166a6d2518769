"""Output of a step: from tensors on the device to a `ModelRunnerOutput`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.sampling import ALL_MASKED, HostTokens, LogprobsTensors
from llmstack_model_runner.sampling.rejection import NO_DRAFT, count_kept
from llmstack_model_runner.steps.input_batch import InputBatch, Reservation, StepRows
from llmstack_model_runner.steps.pooling import PooledRows
from llmstack_model_runner.steps.prompt_logprobs import PromptLogprobs
from llmstack_types import ModelRunnerOutput, NoTokenAllowedError, NumericalError, TokenLogprobs


class PendingOutput(Protocol):
    """A step that has been started."""

    def result(self) -> ModelRunnerOutput:
        """Blocks until the step is complete; repeated calls return the same output."""
        ...


class Sampled(Protocol):
    """Sampled tokens, on the device or on the host."""

    def on_host(self) -> HostTokens:
        """Blocks until the tokens are on the host and returns them."""
        ...


@dataclass(slots=True)
class PendingStep:
    """A step that has been started. The first call of `result` waits for it and adds its tokens to the batch.

    Attributes:
        sampling_indices: Rows of the step that sample.
        sampled: A token for each of them, and one more for each draft; None if no row samples.
        reservation: Reserved places of the tokens in the batch; None if they are appended.
        failures: Indices of rows whose results are not used, to the text of their error.
    """

    batch: InputBatch
    step: StepRows
    sampling_indices: IntArray
    sampled: Sampled | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Sequence[PooledRows] = ()
    reservation: Reservation | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    _output: ModelRunnerOutput | None = field(default=None, init=False)

    def result(self) -> ModelRunnerOutput:
        """Results of the step; repeated calls return the same output."""
        if self._output is None:
            self._output = self._collect()
        return self._output

    def _collect(self) -> ModelRunnerOutput:
        request_ids = self.step.request_ids
        sampled_token_ids: list[list[int]] = [[] for _ in request_ids]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        errors: dict[str, str] = {}
        if self.sampled is not None:
            sampled = self.sampled.on_host()
            indices = self._collect_tokens(sampled, sampled_token_ids, errors)
            if sampled.logprobs is not None:
                logprobs = self._collect_logprobs(sampled, sampled.logprobs, indices, errors)
        pooled: dict[str, bytes] = {}
        for rows in self.pooled:
            values, failed = rows.to_bytes()
            pooled |= values
            errors |= failed
        prompt_logprobs = {part.request_id: part.tensors.to_lists() for part in self.prompt_logprobs}
        for index, text in self.failures.items():
            sampled_token_ids[index], errors[request_ids[index]] = [], text
            for results in (logprobs, prompt_logprobs, pooled):
                results.pop(request_ids[index], None)
        return ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=sampled_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            pooled=pooled,
        )

    def _collect_tokens(
        self, sampled: HostTokens, sampled_token_ids: list[list[int]], errors: dict[str, str]
    ) -> IntArray:
        """Adds the tokens to the batch; returns the row of the step for each token, -1 for dropped ones."""
        token_ids, is_good = sampled.token_ids, sampled.is_good
        if self.reservation is None and not self.step.has_drafts and is_good.all():
            return self._append_all(token_ids, sampled_token_ids)
        # A failed row gets a token too, since the next step may be scheduled for it already.
        good_token_ids = np.where(is_good, token_ids, 0)
        num_drafts = self.step.num_drafts[self.sampling_indices]
        rows = self.step.rows[self.sampling_indices]
        if num_drafts.any():
            num_kept = self._verify(token_ids, is_good, num_drafts)
            places = ragged_aranges(np.zeros_like(num_drafts), num_drafts + 1)
            is_kept = places < np.repeat(num_kept, num_drafts + 1)
            indices = np.where(is_kept, np.repeat(self.sampling_indices, num_drafts + 1), -1)
            self.batch.append_tokens(rows, good_token_ids[is_kept], num_kept)
        else:
            indices = self.sampling_indices
            if self.reservation is None:
                self.batch.append_tokens(rows, good_token_ids)
            else:
                self.batch.fill(self.reservation, good_token_ids)
        has_failed = (indices >= 0) & ~is_good
        for index, token_id in zip(indices[has_failed].tolist(), token_ids[has_failed].tolist(), strict=True):
            error = NoTokenAllowedError if token_id == ALL_MASKED else NumericalError
            errors[self.step.request_ids[index]] = error.TEXT
        for index, token_id in zip(indices.tolist(), token_ids.tolist(), strict=True):
            if index >= 0 and self.step.request_ids[index] not in errors:
                sampled_token_ids[index].append(token_id)
        return indices

    def _append_all(self, token_ids: IntArray, sampled_token_ids: list[list[int]]) -> IntArray:
        """Adds one good token per sampling row, as most steps do."""
        indices = self.sampling_indices
        self.batch.append_tokens(self.step.rows[indices], token_ids)
        for index, token_id in zip(indices.tolist(), token_ids.tolist(), strict=True):
            sampled_token_ids[index].append(token_id)
        return indices

    def _verify(self, token_ids: IntArray, is_good: npt.NDArray[np.bool_], num_drafts: IntArray) -> IntArray:
        """Number of tokens kept of each sampling row."""
        rows, num_places = self.step.rows[self.sampling_indices], num_drafts + 1
        columns = ragged_aranges(self.batch.num_tokens[rows], num_places)
        draft_token_ids = self.batch.token_ids[np.repeat(rows, num_places), columns].astype(np.int64)
        draft_token_ids[np.cumsum(num_places) - 1] = NO_DRAFT
        return count_kept(token_ids, is_good, draft_token_ids, num_places)

    def _collect_logprobs(
        self, sampled: HostTokens, tensors: LogprobsTensors, indices: IntArray, errors: dict[str, str]
    ) -> dict[str, list[TokenLogprobs]]:
        """`indices` is what `_collect_tokens` returns."""
        logprobs: dict[str, list[TokenLogprobs]] = {}
        places = np.array(sampled.logprob_rows)
        for index, entry in zip(indices[places].tolist(), tensors.to_lists(), strict=True):
            request_id = self.step.request_ids[index]
            if index >= 0 and request_id not in errors:
                logprobs.setdefault(request_id, []).append(entry)
        return logprobs
