"""What a simulation draws: its configuration, its texts and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_core_scheduler.testing import next_token

VOCAB_SIZE = 1000


class GuessingDrafts:
    """A source of drafts that is right until a place that depends on the text."""

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """There is nothing to learn."""

    def forget(self, request_id: str) -> None:
        """There is nothing to forget."""

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """Some right tokens, then wrong ones; sometimes more than asked for, sometimes none."""
        if sum(token_ids[-3:]) % 5 == 0:
            return []
        text = list(token_ids)
        num_right = text[-1] % 4
        for index in range(max_num_tokens + 1):
            text.append(next_token(text, VOCAB_SIZE) if index < num_right else 0)
        return text[len(token_ids) :]


def repetitive_token(token_ids: Sequence[int]) -> int:
    """Mostly what followed the last token when it last occurred: the fake model for drafts that are looked up."""
    token_id = next_token(token_ids, VOCAB_SIZE)
    if token_id % 4:
        for index in range(len(token_ids) - 2, -1, -1):
            if token_ids[index] == token_ids[-1]:
                return token_ids[index + 1]
    return token_id


ONE_STAGE_ONLY: dict[str, Any] = {"num_lookahead_slots": 0, "max_itl_steps": 0.0, "shorter_prompts_first": False}
"""What a configuration with several stages lacks."""


def draw_config(random: Random, seed: int, *, has_states: bool) -> SchedulerConfig:
    """The configuration of a seed; its draws come first of all."""
    is_chunked = random.random() < 0.8
    max_model_len = random.randint(8, 150)
    config = SchedulerConfig(
        max_num_seqs=random.randint(1, 12),
        max_num_batched_tokens=random.randint(1, 64) if is_chunked else max_model_len + random.randint(0, 20),
        max_model_len=max_model_len,
        enable_chunked_prefill=is_chunked,
        policy=random.choice(["fcfs", "priority", "fair"]),
        fair_quantum=random.choice([1, 8, 64]),
        long_prefill_token_threshold=random.choice([0, 0, 1, 5]) if is_chunked else 0,
        max_num_partial_prefills=random.choice([0, 1, 2]),
        num_lookahead_slots=random.choice([0, 0, 1, 4]),
        max_num_preemptions=random.choice([1, 2, 4]),
        max_prefill_tokens=random.choice([0, 0, 1, 16]),
        max_itl_steps=3.0 if is_chunked and max_model_len % 2 else 0.0,
        state_snapshot_interval=(0, 5, 24)[seed % 3],
    )
    if seed % 2 or not is_chunked or config.policy == "priority" or has_states:
        return config
    # Steps are so small that some prompts are long.
    changes = {"max_num_batched_tokens": 9 + seed % 7, "long_prefill_token_threshold": 0, "max_model_len": 150}
    return replace(config, shorter_prompts_first=True, **changes)
