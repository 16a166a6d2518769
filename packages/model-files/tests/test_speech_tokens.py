"""Token ids of speech models are read, and what lacks one is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_model_files import ModelFilesError, parse_speech_tokens

ENGLISH: dict[str, Any] = {
    "decoder_start_token_id": 50257, "eos_token_id": 50256, "no_timestamps_token_id": 50362, "is_multilingual": False,
    "suppress_tokens": [1, 2], "begin_suppress_tokens": [220, 50256], "alignment_heads": [[1, 0], [2, 5]],
    "prev_sot_token_id": 50360,
}  # fmt: skip
MULTILINGUAL = {
    **ENGLISH, "is_multilingual": True, "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
}  # fmt: skip


def test_ids_of_a_checkpoint_are_read() -> None:
    tokens = parse_speech_tokens(MULTILINGUAL)
    assert tokens.languages == {"en": 50259, "de": 50261}
    assert tokens.is_multilingual
    assert (tokens.start, tokens.end, tokens.previous) == (50257, 50256, 50360)
    assert (tokens.no_speech, tokens.no_timestamps, tokens.first_timestamp) == (50361, 50362, 50363)
    assert tokens.alignment_heads == ((1, 0), (2, 5))
    assert tokens.max_initial_timestamp == 50
    english = parse_speech_tokens({**ENGLISH, "eos_token_id": [50256], "max_initial_timestamp_index": None})
    assert not english.is_multilingual
    assert english.max_initial_timestamp is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id"), ({"eos_token_id": "x"}, "eos_token_id"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"), ({"lang_to_id": None}, "lang_to_id"),
        ({"task_to_id": {"transcribe": True}}, "task_to_id"), ({"alignment_heads": [[1]]}, "alignment_heads"),
        ({"max_initial_timestamp_index": 1.5}, "max_initial_timestamp_index"),
    ],
)  # fmt: skip
def test_a_bad_id_is_refused_by_its_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelFilesError, match=name):
        parse_speech_tokens({**MULTILINGUAL, **change})
