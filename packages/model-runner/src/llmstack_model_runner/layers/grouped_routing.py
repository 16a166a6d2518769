"""Choice of experts within the best groups of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NUM_BEST = 2
"""Experts whose scores say how good a group is, where choices are corrected."""


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """How the experts of a token are chosen and weighed.

    Attributes:
        num_groups: Equal groups that the experts form; they are spread over nodes in groups.
        num_group_choices: Groups that a token may choose experts of.
        scaling: Factor of the weights of the chosen experts.
        is_corrected: Scores are sigmoids, to which each expert's correction is added for the choice alone. A group is
            as good as its two best experts. Otherwise they are a softmax, and a group is as good as its best expert.
        is_normalised: The weights of a token's experts are divided by their sum.
        is_sigmoid: Scores are sigmoids though nothing corrects them.
        is_softmax: Scores are a softmax though they are corrected.
        least_sum: Is added to that sum.
    """

    num_groups: int = 1
    num_group_choices: int = 1
    scaling: float = 1.0
    is_corrected: bool = False
    is_normalised: bool = False
    is_sigmoid: bool = False
    is_softmax: bool = False
    least_sum: float = 1e-20

    def check(self, num_experts: int, num_choices: int) -> None:
        """ValueError if so many experts do not form the groups, or the chosen groups have too few for a token."""
        num_groups, num_group_choices = self.num_groups, self.num_group_choices
        least = _NUM_BEST if self.is_corrected else 1  # experts that say how good a group is
        if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < least):
            raise ValueError(f"config.json: {num_experts} experts do not form {num_groups} groups.")
        if num_group_choices > num_groups or num_choices > num_experts // num_groups * num_group_choices:
            raise ValueError(
                f"config.json: {num_choices} experts of a token are more than {num_group_choices} of {num_groups} "
                "groups have."
            )

    def choose(
        self,
        logits: torch.Tensor,  # [num_tokens, num_experts] float32
        correction: torch.Tensor | None,  # [num_experts] float32
        num_choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the chosen experts, each [num_tokens, num_choices]."""
        has_sigmoids = (self.is_corrected or self.is_sigmoid) and not self.is_softmax
        scores = _sigmoid(logits) if has_sigmoids else logits.softmax(dim=-1)
        ranking = scores if correction is None else scores + correction
        if self.num_groups > 1:
            ranking = self._within_groups(ranking)
        expert_ids = torch.topk(ranking, num_choices, dim=-1).indices
        shares = scores.gather(1, expert_ids)
        if self.is_normalised:
            shares = shares / (_sum(shares)[:, None] + self.least_sum)
        return shares * self.scaling, expert_ids

    def _within_groups(self, ranking: torch.Tensor) -> torch.Tensor:
        """The ranking with the experts of all other groups last."""
        groups = ranking.view(len(ranking), self.num_groups, -1)
        goodness = _sum(groups.topk(_NUM_BEST if self.is_corrected else 1, dim=-1).values)
        best = torch.topk(goodness, self.num_group_choices, dim=-1).indices
        is_other = torch.ones_like(goodness, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_other[..., None], float("-inf")).flatten(1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As a softmax beside 0, which PyTorch takes row by row.

    Its sigmoid computes the last numbers of a tensor in another way, and which ones depends on the number of tokens.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, in order."""
    first, *others = x.unbind(-1)
    for other in others:
        first = first + other
    return first
