"""Trains the byte-level BPE tokenizer and holds the chat form that training and serving share."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
USER = "<|user|>"
STORYTELLER = "<|storyteller|>"
SPECIAL_TOKENS = (END, USER, STORYTELLER)
# System messages are accepted and left out: the model has never seen one. Each finished answer ends with <|endoftext|>.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{- '<|user|>' + (message['content'] | trim) -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|storyteller|>' + (message['content'] | trim) + '<|endoftext|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|storyteller|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` entries; ids 0, 1 and 2 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
