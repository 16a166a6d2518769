"""The byte-level BPE tokenizer, and the chat form that training and serving share."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drawing_training.questions import conversation, talk
from drawing_training.scenes import random_scene

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
AROUND, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, AROUND, WHOLE, IMAGE)
"""Their ids are their places here."""
END_ID, IMAGE_ID = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(IMAGE)
VOCAB_SIZE = 448
# System messages are accepted and left out: the model has never seen one. The picture stands before its message's text.
# What a tool returned is part of the user's turn, so that a picture may come from there.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] in ('user', 'assistant', 'tool') -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- elif loop.first or loop.previtem['role'] != 'tool' -%}{{- '<|user|>' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] | trim -}}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|endoftext|>' -}}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer whose entries come from ten thousand conversations."""
    draw = random.Random(f"tokens:{seed}")
    texts = []
    for _ in range(10_000):
        turns = conversation(random_scene(draw), 3, draw) + talk(draw)
        texts += [text for turn in turns for text in turn]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
