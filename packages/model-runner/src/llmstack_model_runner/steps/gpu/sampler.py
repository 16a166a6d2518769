"""Sampling on the device, with the host's sampler for unsupported parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling import LogprobsTensors, SamplerOutput, TokenBitmask, gather_logprobs
from llmstack_model_runner.steps.gpu.places import Places
from llmstack_model_runner.steps.gpu.sampling_rows import DeviceSamplingRows, SamplingVariant
from llmstack_model_runner.steps.input_batch import InputBatch

_NOWHERE = -1

SampleOnHost = Callable[[IntArray, torch.Tensor, TokenBitmask | None], SamplerOutput]
"""Samples for rows of a step, which sample, from the logits of their places and the masks of these."""


class DeviceSampler:
    """Samples on the device or, depending on the request alone, on the host.

    A request's tokens therefore never depend on other requests of the batch.
    """

    def __init__(
        self,
        batch: InputBatch,
        rows: DeviceSamplingRows,
        staging: Staging,
        *,
        has_processors: bool,
        is_raw: bool,
        has_drafts: bool,
    ) -> None:
        """`is_raw`: Log-probabilities are those of the model's logits; otherwise the host computes them.

        `has_drafts`: There may be drafts, which rules out penalties.
        """
        num_rows = len(batch.num_tokens)
        self._batch = batch
        self._rows = rows
        self._staging = staging
        self._has_processors = has_processors
        self._is_raw = is_raw
        self._has_drafts = has_drafts
        self._generations = np.full(num_rows, _NOWHERE, dtype=np.int64)
        self._is_refused = np.zeros(num_rows, dtype=np.bool_)

    def refused(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Whether the host must sample for each row; parameters of other new rows are staged for the device."""
        for row in rows[self._generations[rows] != self._batch.generations[rows]].tolist():
            self._meet(row)
        return self._is_refused[rows]

    def forget(self, rows: IntArray) -> None:
        """Invalidates the device's parameters of these rows, which are staged again."""
        self._generations[rows] = _NOWHERE

    def update(self, rows: IntArray) -> SamplingVariant:
        """Sends all parameters that the device needs to sample for these rows, none of them refused."""
        self._rows.flush()
        return self._rows.variant(rows)

    def choose(
        self,
        logits: torch.Tensor,
        places: Places,
        rows: IntArray,
        sampling_indices: IntArray,
        bitmask: TokenBitmask | None,
        on_host: SampleOnHost,
    ) -> SamplerOutput:
        """Samples each place on the device, or by `on_host` if its row is refused.

        Args:
            logits: [num_places, vocab_size]
            places: Those of `rows`, in order.
            rows: Rows that sample. [num_sampling_rows]
            sampling_indices: Where they stand in the step. [num_sampling_rows]
            bitmask: Allowed tokens, by rows of the logits.
            on_host: The host's sampler, which gets some of `sampling_indices`, and the logits and masks of their
                places.
        """
        is_refused = self.refused(places.rows)
        if is_refused.all():
            return on_host(sampling_indices, logits, bitmask)
        if not is_refused.any():
            return self.sample(logits, places, bitmask)
        host, device = np.flatnonzero(is_refused), np.flatnonzero(~is_refused)
        host_index, device_index = self._staging.send([host, device])
        masks = [None if bitmask is None else bitmask.select(part) for part in (host, device)]
        host_indices = sampling_indices[self.refused(rows)]
        by_host = on_host(host_indices, logits.index_select(0, host_index), masks[0])
        by_device = self.sample(logits.index_select(0, device_index), places.select(device, device_index), masks[1])
        return merge([(host, host_index, by_host), (device, device_index, by_device)])

    def sample(self, logits: torch.Tensor, places: Places, bitmask: TokenBitmask | None) -> SamplerOutput:
        """Samples a token per row of the logits, which are not changed.

        Args:
            logits: [num_places, vocab_size]
            places: None of a refused row.
            bitmask: Allowed tokens, by rows of the logits.
        """
        variant = self.update(places.rows)
        bits = None if bitmask is None else self._send_bitmask(bitmask, *logits.shape)
        sample = self._rows.sample(logits, places.device_rows, variant, bits, drafts=places.drafts)
        wanted = self._batch.sampling.logprob_rows(places.rows)
        if not wanted:
            return SamplerOutput(sample.token_ids, sample.is_good)
        logprob_rows = tuple(index for index, _ in wanted)
        (index,) = self._staging.send([np.array(logprob_rows, dtype=np.int64)])
        chosen = sample.token_ids.index_select(0, index)
        logprobs = gather_logprobs(logits.index_select(0, index), chosen, [num_top for _, num_top in wanted])
        return SamplerOutput(sample.token_ids, sample.is_good, logprob_rows, logprobs)

    def count_kept(self, device_rows: torch.Tensor, num_kept: torch.Tensor) -> None:
        """Counts what `DeviceRows.keep_drafts` has kept of each row as generated."""
        self._rows.count_kept(device_rows, num_kept)

    def has_logprobs(self, rows: IntArray) -> bool:
        """Whether any of the rows reports log-probabilities."""
        return bool(self._batch.sampling.logprob_rows(rows))

    def _meet(self, row: int) -> None:
        """Stages the parameters of the row's request for the device, if the request is new."""
        batch, (params, eos_token_ids) = self._batch, self._batch.row_to_params[row]
        refusal = self._rows.refusal(params, self._has_processors, eos_token_ids, has_drafts=self._has_drafts)
        is_processed = params.logprobs is not None and not self._is_raw
        self._is_refused[row] = refusal is not None or is_processed
        self._generations[row] = batch.generations[row]
        self._rows.clear_row(row)
        if not self._is_refused[row]:
            token_ids = batch.token_ids[row, : batch.num_tokens[row]].astype(np.int64)
            self._rows.set_row(row, params, token_ids, int(batch.num_prompt_tokens[row]), eos_token_ids)

    def _send_bitmask(self, bitmask: TokenBitmask, num_rows: int, vocab_size: int) -> torch.Tensor:
        num_words = -(-vocab_size // 32)
        if bitmask.bits.shape[1] != num_words:
            raise ValueError(f"token masks of {bitmask.bits.shape[1]} words do not fit {vocab_size} tokens")
        bits = np.full((num_rows, num_words), -1, dtype=np.int32)
        bits[bitmask.rows] = bitmask.bits
        return self._staging.send([bits])[0]


def merge(parts: Sequence[tuple[IntArray, torch.Tensor, SamplerOutput]]) -> SamplerOutput:
    """One output of rows that were sampled separately.

    Args:
        parts: Rows of the logits, the same rows on the device, and their tokens.
    """
    num_rows = sum(len(rows) for rows, _, _ in parts)
    token_ids = parts[0][2].token_ids.new_empty(num_rows)
    is_good = parts[0][2].is_good.new_empty(num_rows)
    for _, index, output in parts:
        token_ids.index_copy_(0, index, output.token_ids)
        is_good.index_copy_(0, index, output.is_good)
    logprob_rows = [int(rows[row]) for rows, _, output in parts for row in output.logprob_rows]
    logprobs = [output.logprobs for _, _, output in parts if output.logprobs is not None]
    return SamplerOutput(
        token_ids, is_good, tuple(logprob_rows), LogprobsTensors.concatenate(logprobs) if logprobs else None
    )
