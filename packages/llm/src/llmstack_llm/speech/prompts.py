"""Prompts with sound in vLLM's forms, for calls of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.requests import RenderedPrompt
from llmstack_llm.speech.served import Speech, at_start
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import InvalidRequestError

MEDIA_KEY: Final = "multi_modal_data"
_KEYS: Final = ("prompt", "prompt_token_ids", MEDIA_KEY)
_PAIR_KEYS: Final = ("encoder_prompt", "decoder_prompt")


class SoundPrompt(NamedTuple):
    """A prompt of a decoder, and the sound that it is about.

    Attributes:
        text: None where token ids are given.
    """

    text: str | None
    token_ids: list[int]
    samples: object
    sample_rate: int | None


def is_sound_prompt(prompt: object) -> bool:
    """Whether a prompt is a dict in one of the forms that have sound."""
    return isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in (MEDIA_KEY, *_PAIR_KEYS))


def read_sound_prompt(prompt: Mapping[str, object], tokenizer: Tokenizer | None, param: str) -> SoundPrompt:
    """The parts of `{"prompt": …, "multi_modal_data": {"audio": …}}`.

    The same may be divided into an `encoder_prompt` with the sound and a `decoder_prompt`. Sound is an array at the
    model's rate, or (array, samples per second) at any.

    Raises:
        InvalidRequestError: A key is missing, unknown, or has a wrong value.
    """
    encoder, decoder = _divided(prompt, param)
    _refuse_others(decoder, _KEYS, param)
    samples, rate = _read_sound(encoder.get(MEDIA_KEY), f"{param}.{MEDIA_KEY}")
    text, token_ids = decoder.get("prompt"), decoder.get("prompt_token_ids")
    if token_ids is not None:
        if not isinstance(token_ids, list | tuple):
            raise request_errors.invalid_type(param, "a string or a list of token ids", token_ids)
        return SoundPrompt(None, list(token_ids), samples, rate)
    if not isinstance(text, str):
        raise request_errors.invalid_type(param, "a string or a list of token ids", text)
    check_text(param, text)
    if tokenizer is None:
        raise request_errors.unsupported_value(param, "there is no tokenizer, so it takes token ids only")
    return SoundPrompt(text, tokenizer.encode(text, add_special_tokens=False), samples, rate)


def _divided(prompt: Mapping[str, object], param: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The two parts of a prompt, with the sound and with the tokens; both the whole where it is not divided."""
    if all(prompt.get(key) is None for key in _PAIR_KEYS):
        return prompt, prompt
    _refuse_others(prompt, _PAIR_KEYS, param)
    encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    if not isinstance(encoder, Mapping):
        raise request_errors.invalid_type(f"{param}.encoder_prompt", f"a dict with '{MEDIA_KEY}'", encoder)
    _refuse_others(encoder, _KEYS, f"{param}.encoder_prompt")
    if isinstance(decoder, Mapping):
        return encoder, decoder
    return encoder, {"prompt": decoder} if isinstance(decoder, str) else {"prompt_token_ids": decoder}


async def open_sound_prompt(prompt: SoundPrompt, speech: Speech, tenant: str, param: str) -> RenderedPrompt:
    """The prompt with its window opened.

    Raises:
        InvalidRequestError: The sound is no window, or has a rate that no sound has.
    """
    try:
        window = await speech.open(prompt.samples, tenant, prompt.sample_rate)
    except InvalidRequestError as error:
        name = f"{param}.{MEDIA_KEY}.audio"
        raise InvalidRequestError(error.message, param=name, code=error.code) from error
    return RenderedPrompt(prompt.text or "", prompt.token_ids, media=(at_start(window),))


def _refuse_others(prompt: Mapping[str, object], known: tuple[str, ...], param: str) -> None:
    for key, value in prompt.items():
        if key not in known and value is not None:
            name = request_errors.echo(key)
            raise request_errors.unsupported_parameter(f"{param}.{name}", f"a prompt with sound has no '{name}'")


def _read_sound(data: object, param: str) -> tuple[object, int | None]:
    if not isinstance(data, Mapping) or data.get("audio") is None:
        raise request_errors.invalid_type(param, "a dict such as {'audio': (array, rate)}", data)
    for kind in data:
        if kind != "audio":
            name = request_errors.echo(kind)
            raise request_errors.unsupported_parameter(f"{param}.{name}", "this model takes audio only")
    given = data["audio"]
    if isinstance(given, list) and len(given) == 1:
        (given,) = given
    if isinstance(given, tuple) and len(given) == 2 and type(given[1]) in (int, float) and given[1] % 1 == 0:
        return given[0], int(given[1])
    if isinstance(given, list | tuple | str | bytes):
        raise request_errors.invalid_type(f"{param}.audio", "one array, or (array, rate)", given)
    return given, None
