"""Log-probabilities of chosen tokens and of the most likely tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.sampling.fast_cpu import count_above
from llmstack_model_runner.sampling.top_k_top_p import exact_top_k
from llmstack_types import TokenLogprobs
from llmstack_types.engine_core import MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of several positions, on the device.

    Attributes:
        num_top: Number of most likely tokens that each position reports; at most the width.
    """

    chosen_token_ids: torch.Tensor  # [num_positions] int64
    chosen_logprobs: torch.Tensor  # [num_positions] float32
    ranks: torch.Tensor  # [num_positions] int64
    top_token_ids: torch.Tensor  # [num_positions, width] int64
    top_logprobs: torch.Tensor  # [num_positions, width] float32
    num_top: Sequence[int]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order of the fields."""
        return [self.chosen_token_ids, self.chosen_logprobs, self.ranks, self.top_token_ids, self.top_logprobs]

    def elsewhere(self, tensors: Sequence[torch.Tensor]) -> LogprobsTensors:
        """The same object with other tensors, given in the order of the fields."""
        chosen_token_ids, chosen_logprobs, ranks, top_token_ids, top_logprobs = tensors
        return LogprobsTensors(chosen_token_ids, chosen_logprobs, ranks, top_token_ids, top_logprobs, self.num_top)

    @staticmethod
    def concatenate(parts: Sequence[LogprobsTensors]) -> LogprobsTensors:
        """The positions of all parts in order; narrower parts are padded."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.top_token_ids.shape[1] for part in parts)
        columns = [
            torch.cat([_widened(tensor, width) for tensor in tensors])
            for tensors in zip(*[part.tensors for part in parts], strict=True)
        ]
        return replace(parts[0].elsewhere(columns), num_top=[num for part in parts for num in part.num_top])

    def to_lists(self) -> list[TokenLogprobs]:
        """One entry per position; blocks until the device is done."""
        chosen = zip(self.chosen_token_ids.tolist(), self.chosen_logprobs.tolist(), self.ranks.tolist(), strict=True)
        tops = zip(self.top_token_ids.tolist(), self.top_logprobs.tolist(), self.num_top, strict=True)
        return [
            TokenLogprobs(
                token_ids=(token_id, *top_ids[:num_top]), logprobs=(logprob, *top_logprobs[:num_top]), rank=rank
            )
            for (token_id, logprob, rank), (top_ids, top_logprobs, num_top) in zip(chosen, tops, strict=True)
        ]


def gather_logprobs(
    logits: torch.Tensor,
    chosen_token_ids: torch.Tensor,
    num_top: Sequence[int],
    wanted: Mapping[int, npt.NDArray[np.int64]] | None = None,
    taken: Sequence[int] = (),
) -> LogprobsTensors:
    """Log-softmax of each row at the chosen token and at its `num_top` most likely tokens; -1 means all.

    The rank of a token is one more than the number of more likely tokens. Equally likely tokens are reported by
    ascending id.

    Args:
        logits: float32 [num_positions, vocab_size]
        chosen_token_ids: int64 [num_positions]
        num_top: Number of tokens for each position.
        wanted: Position to the tokens that it reports in place of the most likely ones.
        taken: Positions whose logits are log-probabilities already, which need not sum to 1.
    """
    vocab_size = logits.shape[-1]
    num_top = [vocab_size if num < 0 else min(num, vocab_size) for num in num_top]
    logprobs = logits.log_softmax(dim=-1)
    if taken:
        logprobs[taken] = logits[taken]
    chosen = logprobs.gather(-1, chosen_token_ids[:, None])
    width = max(num_top, default=0)
    top_logprobs, top_token_ids = exact_top_k(logprobs, width) if width else _no_top(logprobs)
    for position, token_ids in (wanted or {}).items():
        num_top[position] = len(token_ids)
        top_token_ids, top_logprobs = (_widened(one, len(token_ids)) for one in (top_token_ids, top_logprobs))
        index = torch.from_numpy(token_ids).to(logprobs.device)
        top_token_ids[position, : len(token_ids)] = index
        top_logprobs[position, : len(token_ids)] = logprobs[position, index]
    return LogprobsTensors(
        chosen_token_ids=chosen_token_ids,
        chosen_logprobs=_finite(chosen.squeeze(-1)),
        ranks=count_above(logprobs, chosen) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=_finite(top_logprobs),
        num_top=num_top,
    )


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return (
        tensor
        if tensor.ndim == 1 or tensor.shape[1] >= width
        else torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))
    )


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    """Replaces NaN and infinity, which JSON does not have; such rows are reported as errors elsewhere."""
    return logprobs.clamp(min=MIN_LOGPROB).nan_to_num(nan=MIN_LOGPROB)


def _no_top(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
