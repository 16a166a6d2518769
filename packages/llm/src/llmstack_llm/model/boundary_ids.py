"""Ids of the tokens at the beginning and at the end of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_llm.model.config import ModelConfig
    from llmstack_llm.text.tokenizer import Tokenizer


def eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a completion: those of the model, and the one of its tokenizer."""
    eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
    found = (*model_config.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,)))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id < model_config.vocab_size))


def start_token_id(model_config: ModelConfig, tokenizer: Tokenizer | None) -> int | None:
    """The id with which an empty prompt starts; None where the model has none."""
    named = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    found = (*named, model_config.bos_token_id, *model_config.eos_token_ids)
    return next((token_id for token_id in found if token_id is not None), None)
