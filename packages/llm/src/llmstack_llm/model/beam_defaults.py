"""Defaults of beam searches in a model's own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class BeamDefaults:
    """Keys of `generation_config.json` that count for beam searches alone, as in transformers.

    Attributes:
        sampling: Field of `SamplingParams` to its value, unchecked.
        min_length: Tokens of prompt and answer together, before which no answer ends.
        min_new_tokens: The same of the answer alone, in place of `min_length`; 0 for none.
        refused: Keys that change what transformers finds, and that are not applied here.
    """

    sampling: Mapping[str, object] = field(default_factory=dict)
    min_length: int = 0
    min_new_tokens: int = 0
    refused: tuple[str, ...] = ()

    def min_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Tokens of an answer before which it does not end."""
        return max(0, min(self.min_new_tokens or self.min_length - num_prompt_tokens, max_tokens))


_NEUTRAL: Final[Mapping[str, Callable[[object], bool]]] = {
    "num_beam_groups": lambda value: value == 1,
    "diversity_penalty": lambda value: value == 0,
    "encoder_repetition_penalty": lambda value: value == 1,
    "encoder_no_repeat_ngram_size": lambda value: value == 0,
    "exponential_decay_length_penalty": lambda value: False,
    "sequence_bias": lambda value: not value,
    "force_words_ids": lambda value: not value,
    "constraints": lambda value: not value,
    "guidance_scale": lambda value: value == 1,
    "renormalize_logits": lambda value: value is False,
}
_SUPPRESSED: Final = ("suppress_tokens", "begin_suppress_tokens")
"""Keys that a model of speech applies to every answer."""


def beam_defaults(generation: Mapping[str, object], *, is_speech: bool) -> BeamDefaults:
    """The beam searches of a model with this file. `is_speech`: Its decoder has rules, which apply some keys."""
    sampling: dict[str, object] = {
        key: generation[key]
        for key in ("length_penalty", "early_stopping", "no_repeat_ngram_size")
        if generation.get(key) is not None
    }
    refused = [key for key, is_neutral in _NEUTRAL.items() if not _passes(generation.get(key), is_neutral)]
    if not is_speech:
        refused += [key for key in _SUPPRESSED if generation.get(key)]
    forced = generation.get("forced_eos_token_id")
    if isinstance(forced, Sequence) and len(forced) == 1:
        (forced,) = forced
    if type(forced) is int:
        sampling["forced_eos_token_id"] = forced
    elif forced is not None:
        refused.append("forced_eos_token_id")
    if generation.get("bad_words_ids"):
        sampling["bad_words_token_ids"] = generation["bad_words_ids"]
    return BeamDefaults(
        sampling, _number(generation.get("min_length")), _number(generation.get("min_new_tokens")), tuple(refused)
    )


def _passes(value: object, is_neutral: Callable[[object], bool]) -> bool:
    return value is None or is_neutral(value)


def _number(value: object) -> int:
    return value if type(value) is int else 0
