"""Turns what one step computed on the device into a `ModelRunnerOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmstack_model_runner.input_batch import InputBatch, IntArray, StepRows
from llmstack_model_runner.prompt_logprobs import PromptLogprobs
from llmstack_model_runner.sampling import SamplerOutput
from llmstack_types import ModelRunnerOutput, TokenLogprobs

BAD_LOGITS = "the model gave no usable probabilities for the next token"


@dataclass(slots=True)
class PendingStep:
    """A step under way; the first `result` waits for it and appends its tokens to the batch.

    Attributes:
        sampling_indices: Which rows of the step sampled; parallel to the rows of `sampled`.
        sampled: None when no row samples.
    """

    batch: InputBatch
    step: StepRows
    sampling_indices: IntArray
    sampled: SamplerOutput | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    _output: ModelRunnerOutput | None = field(default=None, init=False)

    def result(self) -> ModelRunnerOutput:
        """The step's results; repeated calls return the same."""
        if self._output is None:
            self._output = self._collect()
        return self._output

    def _collect(self) -> ModelRunnerOutput:
        request_ids = self.step.request_ids
        sampled_token_ids: list[list[int]] = [[] for _ in request_ids]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        errors: dict[str, str] = {}
        if self.sampled is not None:
            self._collect_tokens(self.sampled, sampled_token_ids, errors)
            logprobs = self._collect_logprobs(self.sampled, errors)
        return ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=sampled_token_ids,
            logprobs=logprobs,
            prompt_logprobs={part.request_id: part.tensors.to_lists() for part in self.prompt_logprobs},
            errors=errors,
        )

    def _collect_tokens(
        self, sampled: SamplerOutput, sampled_token_ids: list[list[int]], errors: dict[str, str]
    ) -> None:
        token_ids, is_good = sampled.token_ids.cpu().numpy(), sampled.is_good.cpu().numpy()
        good_indices = self.sampling_indices[is_good]
        # A row that failed gets a token as well: the step after this one may have been scheduled for it already.
        self.batch.append_tokens(self.step.rows[self.sampling_indices], np.where(is_good, token_ids, 0))
        for index, token_id in zip(good_indices.tolist(), token_ids[is_good].tolist(), strict=True):
            sampled_token_ids[index].append(token_id)
        for index in self.sampling_indices[~is_good].tolist():
            errors[self.step.request_ids[index]] = BAD_LOGITS

    def _collect_logprobs(self, sampled: SamplerOutput, errors: dict[str, str]) -> dict[str, list[TokenLogprobs]]:
        if sampled.logprobs is None:
            return {}
        indices = self.sampling_indices[np.array(sampled.logprob_rows)].tolist()
        request_ids = [self.step.request_ids[index] for index in indices]
        entries = zip(request_ids, sampled.logprobs.to_lists(), strict=True)
        return {request_id: [entry] for request_id, entry in entries if request_id not in errors}
