"""Prompts that go to an encoder, as an item to which all tokens attend."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llmstack_llm import request_errors
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_types import EngineStartError, MediaItem, MediaMemory

FORCED: Final = "forced_bos_token_id"
KIND: Final = "text"
_ID_BYTES: Final = 4


class SourcePrompts:
    """Prompts of a model with an encoder and a decoder.

    Attributes:
        max_tokens: The longest prompt that the encoder takes.
    """

    def __init__(self, start_token_id: int, max_tokens: int, forced_token_id: int | None = None) -> None:
        """`start_token_id`: With which every answer of the decoder begins. `forced_token_id`: What follows it."""
        self._start_token_id, self._forced_token_id = start_token_id, forced_token_id
        self.max_tokens = max_tokens

    def take(
        self, token_ids: Sequence[int], sampling: CheckedSampling, param: str
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The decoder's first tokens, and the item of the encoder's tokens, which are ids of the vocabulary.

        Raises:
            InvalidRequestError: The prompt is too long for the encoder, or a field has no meaning here.
        """
        if len(token_ids) > self.max_tokens:
            raise request_errors.context_length_exceeded(param, self.max_tokens, len(token_ids))
        if sampling.values.get("prompt_logprobs") is not None:
            reason = "the prompt goes to an encoder, and is not what the answer continues"
            name = sampling.names.get("prompt_logprobs", "prompt_logprobs")
            raise request_errors.unsupported_parameter(name, reason)
        forced = sampling.values.get(FORCED, self._forced_token_id)
        first = [self._start_token_id, *([] if forced is None else [forced])]
        data = _bytes_of(token_ids)
        digest = hashlib.sha256(KIND.encode() + data).digest()
        memory = MediaMemory(len(data), data=data)
        return first, (MediaItem(digest, KIND, 0, 1, num_units=len(token_ids), memory=memory),)


def make_source(folder: Path, max_tokens: int) -> SourcePrompts:
    """The prompts of the model in a folder, whose encoder takes so many tokens.

    Raises:
        EngineStartError: No file says how its decoder begins.
    """
    from llmstack_model_files import read_json

    files = [read_json(folder, f"{name}.json", required=False) or {} for name in ("generation_config", "config")]
    names = ("decoder_start_token_id", "bos_token_id")
    found = next((file[name] for name in names for file in files if isinstance(file.get(name), int)), None)
    if found is None:
        raise EngineStartError("no file of the model has decoder_start_token_id, with which its decoder begins")
    # As in transformers, sampling defaults stand in the first file, unless there is none.
    forced = None if files[0] else files[1].get(FORCED)
    return SourcePrompts(found, max_tokens, forced if isinstance(forced, int) else None)


def num_source_tokens(media: Sequence[MediaItem]) -> int:
    """Tokens that go to an encoder."""
    return sum(item.num_units for item in media if item.kind == KIND)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    ids = array("i", token_ids)
    if ids.itemsize != _ID_BYTES:
        raise ValueError(f"integers of C have {ids.itemsize} bytes here")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
