"""Sampling on the device for rows of the batch: who can be sampled there, and what else such a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmstack_model_runner.device.sampling_rows import DeviceSamplingRows, SamplingVariant
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.input_batch import InputBatch
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling import LogprobsTensors, TokenBitmask, gather_logprobs

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Sampled tokens on the device; `logprob_rows` and `logprobs` as in `SamplerOutput`."""

    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None


class DeviceSampler:
    """The device counts what it samples. Where the host has sampled for a row, the device is told that row anew."""

    def __init__(
        self, batch: InputBatch, rows: DeviceSamplingRows, staging: Staging, *, has_processors: bool, is_raw: bool
    ) -> None:
        """`is_raw`: Log-probabilities are those of the logits as the model gave them; of others the host takes care."""
        num_rows = len(batch.num_tokens)
        self._batch = batch
        self._rows = rows
        self._staging = staging
        self._has_processors = has_processors
        self._is_raw = is_raw
        self._generations = np.full(num_rows, _NOWHERE, dtype=np.int64)
        self._is_refused = np.zeros(num_rows, dtype=np.bool_)
        self._is_behind = np.zeros(num_rows, dtype=np.bool_)

    def needs_known_tokens(self, rows: IntArray) -> bool:
        """Whether any of the rows has been sampled for by the host, so that the device must be told its tokens."""
        return bool(self._is_behind[rows].any())

    def is_refused(self, rows: IntArray) -> bool:
        """Whether the host must sample for any of the rows."""
        for row in rows[self._generations[rows] != self._batch.generations[rows]].tolist():
            self._meet(row)
        return bool(self._is_refused[rows].any())

    def note_host_choice(self, rows: IntArray) -> None:
        """The host has sampled for these rows."""
        self._is_behind[rows] = ~self._is_refused[rows]

    def forget(self, rows: IntArray) -> None:
        """Nothing is certain of what the device has of these rows: it is told them anew."""
        self._generations[rows] = _NOWHERE

    def bring_up(self, rows: IntArray) -> SamplingVariant:
        """Makes the device know all that it needs to sample for these rows, none of them refused."""
        for row in rows[self._is_behind[rows]].tolist():
            self._tell(row)
        self._rows.flush()
        return self._rows.variant(rows)

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        device_rows: torch.Tensor,
        variant: SamplingVariant,
        bitmask: TokenBitmask | None,
    ) -> DeviceChoice:
        """A token per row of the logits, which are left as they are.

        Args:
            logits: [num_rows, vocab_size]
            rows: Brought up before. [num_rows]
            device_rows: The same on the device. int32 [num_rows]
            variant: What bringing them up said.
            bitmask: Names rows of the logits.
        """
        bits = None if bitmask is None else self._send_bitmask(bitmask, *logits.shape)
        sample = self._rows.sample(logits, device_rows, variant, bits)
        wanted = self._batch.sampling.logprob_rows(rows)
        if not wanted:
            return DeviceChoice(sample.token_ids, sample.is_good)
        logprob_rows = tuple(index for index, _ in wanted)
        (index,) = self._staging.send([np.array(logprob_rows, dtype=np.int64)])
        chosen = sample.token_ids.index_select(0, index)
        logprobs = gather_logprobs(logits.index_select(0, index), chosen, [num_top for _, num_top in wanted])
        return DeviceChoice(sample.token_ids, sample.is_good, logprob_rows, logprobs)

    def has_logprobs(self, rows: IntArray) -> bool:
        """Whether any of the rows reports log-probabilities."""
        return bool(self._batch.sampling.logprob_rows(rows))

    def _meet(self, row: int) -> None:
        """Takes note of the request that the row has now."""
        params, eos_token_ids = self._batch.row_to_params[row]
        refusal = self._rows.refusal(params, self._has_processors, eos_token_ids)
        self._is_refused[row] = refusal is not None or (params.logprobs is not None and not self._is_raw)
        self._generations[row] = self._batch.generations[row]
        self._is_behind[row] = False
        self._rows.clear_row(row)
        if not self._is_refused[row]:
            self._tell(row)

    def _tell(self, row: int) -> None:
        batch, (params, eos_token_ids) = self._batch, self._batch.row_to_params[row]
        token_ids = batch.token_ids[row, : batch.num_tokens[row]].astype(np.int64)
        self._rows.set_row(row, params, token_ids, int(batch.num_prompt_tokens[row]), eos_token_ids)
        self._is_behind[row] = False

    def _send_bitmask(self, bitmask: TokenBitmask, num_rows: int, vocab_size: int) -> torch.Tensor:
        num_words = -(-vocab_size // 32)
        if bitmask.bits.shape[1] != num_words:
            raise ValueError(f"token masks of {bitmask.bits.shape[1]} words do not fit {vocab_size} tokens")
        bits = np.full((num_rows, num_words), -1, dtype=np.int32)
        bits[bitmask.rows] = bitmask.bits
        return self._staging.send([bits])[0]
