"""Use of a model, from the options `runner`, `task` and `convert`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llmstack_types import EngineReady

RUNNERS = ("auto", "generate", "pooling")
"""Any other name is that of a model runner, which says nothing of the use."""


class ModelUse(NamedTuple):
    """Which of the things that a model can do are offered.

    Attributes:
        can_generate: Whether completions are, where the model has an output head.
        can_pool: Whether vectors and labels are.
        can_convert: Whether a model with an output head pools too.
        needs_labels: Whether a model that is no classifier is refused.
    """

    can_generate: bool = True
    can_pool: bool = True
    can_convert: bool = True
    needs_labels: bool = False

    @classmethod
    def from_options(cls, runner: str = "auto", task: str = "auto", convert: str = "auto") -> ModelUse:
        """The use that the options give together; `EngineArgs` has checked their words.

        Raises:
            ValueError: `runner` and `task` contradict each other.
        """
        is_generation = "generate" in (runner, task)
        is_pooling = runner == "pooling" or task not in ("auto", "generate")
        if is_generation and is_pooling:
            raise ValueError(f"runner {runner} and task {task} contradict each other; give one of them")
        return cls(
            can_generate=not is_pooling,
            can_pool=not is_generation,
            can_convert=convert != "none",
            needs_labels=task in ("classify", "score") or convert == "classify",
        )

    def restrict(self, ready: EngineReady) -> EngineReady:
        """The uses that the engine core reports, without those that are not offered.

        Raises:
            EngineStartError: Nothing would be left, or the model has no labels.
        """
        from llmstack_types import EngineStartError

        can_generate = self.can_generate and ready.is_generative
        can_pool = self.can_pool and bool(ready.embedding_size) and (self.can_convert or not ready.is_generative)
        if self.needs_labels and not ready.num_labels:
            raise EngineStartError("the model has no labels: it cannot be used to classify or score")
        if not can_generate and not can_pool:
            found = "generates" if ready.is_generative else "only pools"
            raise EngineStartError(f"the model {found}, which runner, task or convert exclude")
        if can_pool:
            return dataclasses.replace(ready, is_generative=can_generate)
        return dataclasses.replace(ready, embedding_size=0, num_labels=0)
