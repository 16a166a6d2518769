"""Fields of transcriptions and translations, their types, and those not available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ConfigDict, Field

from llmstack_server.web.fields import Decimal, RequestBody
from llmstack_server.web.unsupported import Predicate, one_of

RESPONSE_FORMATS: Final = ("json", "text", "srt", "vtt", "verbose_json")
GRANULARITIES: Final = ("segment", "word")
INCLUDES: Final = ("logprobs",)


class AudioRequest(RequestBody):
    """Fields that a form or a JSON body has for both."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    file: object = Field(None, description="the sound, as a part of a form with a file name")
    file_url: str | None = Field(None, description="in a JSON body, as in batches: where the sound is; data: always")
    model: str | None = None
    prompt: str | None = Field(None, description="a text that goes before, such as one that spells names")
    response_format: str | None = Field(None, description=", ".join(RESPONSE_FORMATS))
    temperature: Decimal | None = Field(None, description="unset: 0, and higher while an answer is not plausible")
    stream: bool | None = None
    stream_include_usage: bool | None = Field(None, description="the last event of a stream always has the usage")
    condition_on_previous_text: bool | None = Field(
        None, description="each part also follows the text of the one before; parts do not run at once then"
    )
    top_p: Decimal | None = None
    top_k: int | None = None
    min_p: Decimal | None = None
    seed: int | None = None
    frequency_penalty: Decimal | None = None
    presence_penalty: Decimal | None = None
    repetition_penalty: Decimal | None = None
    use_beam_search: bool | None = None
    n: int | None = Field(None, description="beams, with use_beam_search; the best one is the answer")
    length_penalty: Decimal | None = None
    max_completion_tokens: int | None = Field(None, description="of each part of 30 seconds")
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = Field(None, description="what the ids of its parts in the engine begin with")
    user: str | None = None


class TranslationRequest(AudioRequest):
    """Body of `POST /v1/audio/translations`."""

    language: str | None = Field(None, description="code of the language that is spoken; unset: it is detected")


class TranscriptionRequest(TranslationRequest):
    """Body of `POST /v1/audio/transcriptions`."""

    timestamp_granularities: list[str] | None = Field(None, description="of verbose_json: segment, word")
    include: list[str] | None = Field(None, description="logprobs, with the formats json and verbose_json")


LISTS: Final = ("timestamp_granularities", "include")
"""Fields that a form may have several times, under their names with `[]`."""
SAMPLING: Final = (
    "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "use_beam_search", "n", "length_penalty",
)  # fmt: skip
_NEVER = one_of()
_OF_BOTH: Mapping[str, Predicate] = {
    "chunking_strategy": one_of("auto"),
    "hotwords": one_of(""),
    "include_stop_str_in_output": one_of(False, "false"),
    "keywords": one_of([]),
    "known_speaker_names": one_of([]),
    "known_speaker_references": one_of([]),
    "languages": one_of([]),
    "stream_continuous_usage_stats": one_of(False, "false"),
    "to_language": _NEVER,
    "vllm_xargs": one_of({}),
    "vad_filter": one_of(False, "false"),
}
TRANSCRIPTIONS: Mapping[str, Predicate] = _OF_BOTH
TRANSLATIONS: Mapping[str, Predicate] = {**_OF_BOTH, "timestamp_granularities": _NEVER, "include": _NEVER}
