"""A model's tokens as the grammar library needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLTokenizer

from llmstack_model_files import ModelFilesError, artifact_path, open_artifact
from llmstack_structured_output import errors
from llmstack_structured_output.special_tokens import hide_special_tokens

MAX_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model; safe to share between threads.

    Attributes:
        tokenizer: The library's own object, which knows special tokens by their ids alone.
        special_tokens: Their names, such as `</s>`, and ids.
    """

    tokenizer: LLTokenizer
    special_tokens: Mapping[str, int]
    _lengths: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        lengths = sorted({len(name) for name in self.special_tokens if name}, reverse=True)
        object.__setattr__(self, "_lengths", lengths)

    def pieces(self, text: str) -> list[str | int]:
        """A text as pieces: strings, and the ids of special tokens whose names it holds."""
        pieces: list[str | int] = []
        begun = at = 0
        while at < len(text):
            names = (text[at : at + length] for length in self._lengths)
            name = next((name for name in names if name in self.special_tokens), "")
            if name:
                pieces += [text[begun:at]] if begun < at else []
                pieces.append(self.special_tokens[name])
                begun = at + len(name)
            at += len(name) or 1
        return pieces + ([text[begun:]] if begun < at else [])


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Reads `tokenizer.json`; takes 0.4 s for 50,000 tokens.

    Args:
        folder: The folder of the tokenizer.
        vocab_size: Width of the logits; ids without a token are never allowed.
        eos_token_ids: The tokens that may end a text, at least one.

    Raises:
        InvalidRequestError: There is no such file, it cannot be used, or there are no end-of-sequence ids.
    """
    if not eos_token_ids:
        raise errors.not_available("structured outputs end with an end-of-sequence token, and this model has none")
    try:
        if artifact_path(folder, "tokenizer.json") is None:
            raise errors.not_available("structured outputs need a tokenizer.json, and this model has none")
        with open_artifact(folder, "tokenizer.json") as file:
            text, special_tokens = hide_special_tokens(file.read(MAX_TOKENIZER_BYTES).decode())
        return Vocabulary(LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids)), special_tokens)
    except (ModelFilesError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"this model's tokenizer cannot be used for structured outputs: {errors.one_line(str(error))}"
        raise errors.not_available(reason) from error
