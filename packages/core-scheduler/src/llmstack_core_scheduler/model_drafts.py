"""Drafts that the model runner makes by a model: the scheduler says how many."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_types.scheduler_output import DRAFT_TO_MAKE


class ModelDrafts:
    """A source of drafts that are not known yet.

    So what is scheduled, and what a log of it holds, depends on no token of the draft model, and a step with drafts by
    a model needs no round between scheduler and runner.
    """

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """The requested number of places."""
        return [DRAFT_TO_MAKE] * max_num_tokens

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """Does nothing: a model learns nothing from its use."""

    def forget(self, request_id: str) -> None:
        """Does nothing: the runner knows of its rows."""
