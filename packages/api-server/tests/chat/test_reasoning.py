"""The count of reasoning tokens."""

from __future__ import annotations

import pytest

from llmstack_server.chat.reasoning import ReasoningCounter


@pytest.mark.parametrize(
    ("is_open", "token_ids", "num_reasoning"),
    [
        (False, [1, 2, 3], 0),
        (False, [8, 1, 2, 9, 3], 2),
        (True, [1, 2, 9, 3, 8, 4], 2),
        (True, [8, 1, 2], 2),
        (True, [9, 1], 0),
    ],
)
def test_tokens_of_reasoning_are_those_between_its_tags(is_open: bool, token_ids: list[int], num_reasoning: int):
    assert ReasoningCounter(8, 9, is_open=is_open).count(token_ids) == num_reasoning
    counter = ReasoningCounter(8, 9, is_open=is_open)
    assert sum(counter.count([token_id]) for token_id in token_ids) == num_reasoning
