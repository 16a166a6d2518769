"""The special tokens of a Whisper checkpoint, out of its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmstack_model_files.folder import ModelFilesError, read_json

SPEECH_ARCHITECTURE: Final = "WhisperForConditionalGeneration"
SECONDS_PER_TIMESTAMP: Final = 0.02
_FILE = "generation_config.json"
_MAX_INITIAL_TIMESTAMP = 50
_MAX_LISTED = 65_536


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Token ids that steer a speech model, and those that it must not generate.

    Attributes:
        start: `<|startoftranscript|>`, the first token of what follows an earlier text.
        end: The token that ends an answer.
        previous: `<|startofprev|>`, which begins an earlier text; None where the checkpoint has none.
        no_timestamps: `<|notimestamps|>`; the timestamp of 0 seconds is the next id.
        languages: Codes of languages, such as `en`, to their tokens; empty for a model of English alone.
        tasks: `transcribe` and `translate` to their tokens; empty with `languages`.
        suppressed: Never generated.
        begin_suppressed: Not generated as the first token of an answer.
        max_initial_timestamp: Most steps of `SECONDS_PER_TIMESTAMP` of the first timestamp; None for no limit.
        alignment_heads: (layer, head) of the cross attention that follows the sound; empty where they are not known.
    """

    start: int
    end: int
    previous: int | None
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    max_initial_timestamp: int | None = _MAX_INITIAL_TIMESTAMP
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def first_timestamp(self) -> int:
        """The timestamp of 0 seconds; those above it are `SECONDS_PER_TIMESTAMP` apart."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """The token whose probability at the start is that of silence: `<|nospeech|>` or `<|nocaptions|>`."""
        return self.no_timestamps - 1

    @property
    def is_multilingual(self) -> bool:
        """Whether a language and a task follow the start token."""
        return bool(self.languages)


def read_speech_tokens(folder: Path) -> SpeechTokens:
    """The tokens of a checkpoint of `SPEECH_ARCHITECTURE`.

    Raises:
        ModelFilesError: The file is not there, or lacks an id.
    """
    return parse_speech_tokens(read_json(folder, _FILE))


def parse_speech_tokens(generation: Mapping[str, Any]) -> SpeechTokens:
    """The tokens of a parsed `generation_config.json`.

    Raises:
        ModelFilesError: It lacks an id, or has one that is none.
    """
    end = generation.get("eos_token_id")
    is_multilingual = generation.get("is_multilingual", bool(generation.get("lang_to_id")))
    languages = {_bare(name): token for name, token in _named(generation, "lang_to_id").items()}
    tasks = _named(generation, "task_to_id")
    if is_multilingual and not (languages and "transcribe" in tasks):
        raise ModelFilesError(f"{_FILE}: a multilingual model needs lang_to_id and task_to_id")
    return SpeechTokens(
        start=_id(generation, "decoder_start_token_id"),
        end=_id({"eos_token_id": end[0] if isinstance(end, list) and end else end}, "eos_token_id"),
        previous=None if generation.get("prev_sot_token_id") is None else _id(generation, "prev_sot_token_id"),
        no_timestamps=_id(generation, "no_timestamps_token_id"),
        languages=languages if is_multilingual else {},
        tasks=tasks if is_multilingual else {},
        suppressed=_ids(generation, "suppress_tokens"),
        begin_suppressed=_ids(generation, "begin_suppress_tokens"),
        max_initial_timestamp=_max_initial_timestamp(generation),
        alignment_heads=_heads(generation),
    )


def _bare(name: str) -> str:
    return name.removeprefix("<|").removesuffix("|>")


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _id(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not _is_id(value):
        raise ModelFilesError(f"{_FILE}: '{name}' must be a token id; checkpoints of 2022 lack some of them")
    return int(value)  # type: ignore[arg-type]  # an integer, as checked


def _named(generation: Mapping[str, Any], name: str) -> dict[str, int]:
    found = generation.get(name) or {}
    if not isinstance(found, Mapping) or not all(map(_is_id, found.values())):
        raise ModelFilesError(f"{_FILE}: '{name}' must map names to token ids")
    return dict(found)


def _ids(generation: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = generation.get(name) or []
    if not isinstance(found, list) or len(found) > _MAX_LISTED or not all(map(_is_id, found)):
        raise ModelFilesError(f"{_FILE}: '{name}' must be a list of token ids")
    return tuple(found)


def _max_initial_timestamp(generation: Mapping[str, Any]) -> int | None:
    value = generation.get("max_initial_timestamp_index", _MAX_INITIAL_TIMESTAMP)
    if value is not None and not _is_id(value):
        raise ModelFilesError(f"{_FILE}: 'max_initial_timestamp_index' must be a number of steps, or null")
    return None if value is None else int(value)


def _heads(generation: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    found = generation.get("alignment_heads") or []
    is_list = isinstance(found, list) and len(found) <= _MAX_LISTED
    if not is_list or not all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_id, pair)) for pair in found):
        raise ModelFilesError(f"{_FILE}: 'alignment_heads' must be pairs of a layer and a head")
    return tuple((layer, head) for layer, head in found)
