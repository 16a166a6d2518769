"""Engines with drafts by a method, and what they answer and guess: for tests of every kind of head."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from draft_references import NUM_TOKENS, PROMPTS, Reference

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

Guesses = list[tuple[list[int], list[int]]]
"""The drafts of all rows, each behind the tokens that were known."""


class Checkpoint(NamedTuple):
    """A served model and what makes its drafts, with a reference of both."""

    path: str
    head: str
    reference: Reference

    @property
    def method(self) -> str:
        return self.reference.method

    @classmethod
    def write(cls, reference: Reference, folder: Path) -> Checkpoint:
        reference.train_head()
        head = reference.write(folder)
        return cls(str(folder / "served" if head else folder), head, reference)

    def build(self, num_drafts: int, max_num_batched_tokens: int = 64, **changes: Any) -> EngineCore:
        """An engine core with so many drafts for each row."""
        limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": max_num_batched_tokens}
        is_on = num_drafts > 0
        model = ModelRunnerConfig(
            self.path, dtype="float32", device="cpu", block_size=8, max_num_drafts=num_drafts,
            draft_head=self.method if is_on else "", draft_model_path=self.head if is_on else "", **limits,
        )  # fmt: skip
        speculative = SpeculativeConfig(self.method, num_drafts, model=self.head) if is_on else None
        scheduler = SchedulerConfig(speculative=speculative, **limits)
        return build_engine_core(EngineConfig(model, scheduler=scheduler, **{"num_blocks": 200} | changes))


def run(core: EngineCore, turn: int = 0, *, num_known: int = 0, **params: Any) -> list[list[int]]:
    """The answer to each prompt; `num_known` tokens of it were computed by another engine core, which died."""
    known = run(core, -1, **params) if num_known else []
    answers: dict[str, list[int]] = {
        f"{turn} {number}": known[number][:num_known] if known else [] for number in range(len(PROMPTS))
    }
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
    for name, prompt in zip(answers, PROMPTS, strict=True):
        core.add_request(EngineCoreRequest(name, prompt, sampling, output_token_ids=answers[name].copy()))
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.new_token_ids
    return list(answers.values())


def record_guesses(monkeypatch: pytest.MonkeyPatch) -> Guesses:
    """Fills with the drafts of all rows from now on."""
    from llmstack_model_runner.drafts.drafts import Drafts

    found: Guesses = []
    place = Drafts._place

    def record(self: Any, rows: Any, drafts: Any, num_made: Any) -> None:
        place(self, rows, drafts, num_made)
        for row, own in zip(rows.tolist(), drafts.tolist(), strict=True):
            known = self._batch.token_ids[row, : self._batch.num_tokens[row]].tolist()
            found.append((known, [token_id for token_id in own if token_id >= 0]))

    monkeypatch.setattr(Drafts, "_place", record)
    return found


def count_right(guesses: Guesses, texts: list[list[int]]) -> int:
    """How many drafts are those of the texts, up to the first wrong one of each row."""
    num_right = 0
    for known, drafts in guesses:
        text = next(text for text in texts if text[: len(known)] == known)
        is_right = np.array(drafts) == np.array(text[len(known) :][: len(drafts)])
        num_right += int(np.cumprod(is_right).sum())
    return num_right
