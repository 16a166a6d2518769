"""Fields that leave no token are refused before the queue."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.admission.contradictions import check_contradictions
from llmstack_types import InvalidRequestError, StructuredOutputsParams

EOS = (7, 8)
NAMES = {"structured_outputs.choice": "guided_choice"}
YES = StructuredOutputsParams(choice=("yes", "yes, please"))


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"allowed_token_ids": [1, 2], "bad_words_token_ids": ((1,), (2,))}, "allowed_token_ids", "'bad_words'"),
        ({"allowed_token_ids": [7], "min_tokens": 1}, "allowed_token_ids", "'min_tokens'"),
        ({"allowed_token_ids": [8, 7], "min_tokens": 3}, "allowed_token_ids", "'min_tokens'"),
        ({"allowed_token_ids": [7, 9], "stop_token_ids": [9], "min_tokens": 1}, "allowed_token_ids", "'min_tokens'"),
        (
            {"allowed_token_ids": [7, 1], "bad_words_token_ids": ((1,),), "min_tokens": 1},
            "allowed_token_ids",
            "'min_tokens'",
        ),
        ({"structured_outputs": YES, "bad_words": ["yes"]}, "bad_words", "each string of 'guided_choice'"),
        ({"structured_outputs": YES, "bad_words": ["no", "es"]}, "bad_words", "each string of 'guided_choice'"),
    ],
    ids=str,
)
def test_a_contradiction_is_refused_by_its_fields(values: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_contradictions(values, NAMES, EOS)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": [1, 2], "bad_words_token_ids": ((1,), (2, 3))},
        {"allowed_token_ids": [7]},
        {"allowed_token_ids": [7, 1], "min_tokens": 1},
        {"stop_token_ids": [9], "min_tokens": 1},
        {"structured_outputs": YES, "bad_words": ["please"]},
        {"structured_outputs": YES},
        {"structured_outputs": StructuredOutputsParams(regex="yes"), "bad_words": ["yes"]},
    ],
    ids=str,
)
def test_what_leaves_a_token_is_no_contradiction(values: dict[str, Any]) -> None:
    check_contradictions(values, NAMES, EOS)
