"""Media parts of messages, checked and taken out of the conversation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_types import InvalidRequestError
from llmstack_types.vocabulary import ImageDetail, MediaKind, words_of

# Type of a part to its kind, and to the key that has the content.
_TYPES: Final[Mapping[str, tuple[MediaKind, str]]] = {
    "image_url": ("image", "image_url"), "input_image": ("image", "image_url"), "image": ("image", "image"),
    "video_url": ("video", "video_url"), "video": ("video", "video"),
    "image_embeds": ("image", "image_embeds"),
    "audio_url": ("audio", "audio_url"), "audio": ("audio", "audio"), "input_audio": ("audio", "input_audio"),
}  # fmt: skip
_SOUND_NAMES: Final = (
    "wav", "mp3", "flac", "ogg", "opus", "webm", "mka", "mkv", "mp4", "m4a", "aac", "mpeg", "mpga",
)  # fmt: skip
"""What `format` of an `input_audio` may say; the file's first bytes decide."""
MEDIA_TYPES: Final = (*_TYPES, "file")
_KEYS_WITHOUT_TYPE: Final = ("image_url", "video_url", "audio_url", "input_audio")
DETAILS: Final = words_of(ImageDetail)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item as a request names it. A message may have it in place of a part that is read here.

    Attributes:
        url: `data:`, `http(s):` or `file:`; empty where `uuid` names one that was sent before.
        uuid: The client's own name for it; empty for none.
        detail: One of `DETAILS`; `low` costs less, and the others are the same.
        param: The field of the request, for errors.
        file_id: A file that a server keeps for the client; the server puts its path in.
        path: A file that is read in place of a URL. It comes from the server alone, never from a request.
        vectors: Vectors in place of a picture, as `admission.prompt_embeds` reads them; None for a picture.
    """

    kind: MediaKind
    url: str
    uuid: str = ""
    detail: str = "auto"
    param: str = "messages"
    file_id: str = ""
    path: str = ""
    vectors: Any = field(default=None, repr=False)


class MediaMark(NamedTuple):
    """A mark in a message in place of a media part. No request can hold one."""

    kind: MediaKind


def has_media(messages: object) -> bool:
    """Whether a message has a media part."""
    if not isinstance(messages, list | tuple):
        return False
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    return any(any(map(_type_of, content)) for content in contents if isinstance(content, list | tuple))


def take_media(messages: Sequence[object], kinds: Mapping[MediaKind, int]) -> tuple[Sequence[Any], list[MediaPart]]:
    """The messages with a mark in place of each media part, and the parts in order; other faults are left in place.

    `kinds`: The kinds that the model takes, and how many of each a prompt may have.

    Raises:
        InvalidRequestError: A part is malformed, of another kind, or one too many; `param` names it.
    """
    if not isinstance(messages, list | tuple):
        return messages, []
    taken: list[MediaPart] = []
    return [_without_media(f"messages[{index}]", one, kinds, taken) for index, one in enumerate(messages)], taken


def _without_media(param: str, message: object, kinds: Mapping[MediaKind, int], taken: list[MediaPart]) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(_type_of, content)):
        return message
    parts: list[object] = []
    for index, part in enumerate(content):
        if _type_of(part) is None:
            parts.append(part)
            continue
        read = read_part(f"{param}.content[{index}]", part, kinds)
        taken.append(read)
        if sum(one.kind == read.kind for one in taken) > kinds[read.kind]:
            raise InvalidRequestError(
                f"A prompt has at most {kinds[read.kind]} items of the kind {read.kind}.",
                param=read.param, code="too_many_images",
            )  # fmt: skip
        parts.append(MediaMark(read.kind))
    return {**message, "content": parts}


def _type_of(part: object) -> str | None:
    """The type of a media part; None of every other value."""
    if isinstance(part, MediaPart):
        return part.kind
    if not isinstance(part, Mapping):
        return None
    given = part.get("type")
    if given is None:
        return next((key for key in _KEYS_WITHOUT_TYPE if part.get(key) is not None), None)
    return given if given in MEDIA_TYPES else None


def read_part(param: str, part: Mapping[str, Any] | MediaPart, kinds: Collection[MediaKind]) -> MediaPart:
    """The item that a part names; one that is read already is checked for its kind.

    Raises:
        InvalidRequestError: It is malformed or of another kind; the field of the request is named.
    """
    name = _type_of(part) or ""
    if name not in _TYPES or _TYPES[name][0] not in kinds:
        param = part.param if isinstance(part, MediaPart) else param
        taken = ", ".join(["text", *kinds])
        raise request_errors.unsupported_parameter(f"{param}.type", f"this model takes {taken} only")
    if isinstance(part, MediaPart):
        return part
    kind, key = _TYPES[name]
    if key == "image_embeds":
        return _vectors(param, part)
    content: Any = part.get(key)
    detail = part.get("detail")
    if key == "input_audio" and content is not None:
        content = _sound_url(f"{param}.{key}", content)
    if isinstance(content, Mapping):
        content, detail = content.get("url"), content.get("detail", detail)
        key = f"{key}.url"
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise request_errors.invalid_type(f"{param}.uuid", "a string", uuid)
    if content is None and not uuid:
        raise request_errors.missing_parameter(f"{param}.{key}")
    _check_content(param, key, content, detail)
    return MediaPart(kind, content or "", uuid or "", detail or "auto", param)


def _check_content(param: str, key: str, content: object, detail: object) -> None:
    if content is not None and not isinstance(content, str):
        raise request_errors.invalid_type(f"{param}.{key}", "a URL", content)
    if content is not None:
        check_text(f"{param}.{key}", content)
    if detail is not None and detail not in DETAILS:
        raise request_errors.invalid_value(f"{param}.detail", f"expected one of {', '.join(DETAILS)}")


def _sound_url(param: str, content: object) -> str:
    """The URL of OpenAI's `{"data": base64, "format": "wav"}`."""
    if not isinstance(content, Mapping):
        raise request_errors.invalid_type(param, "an object with 'data' and 'format'", content)
    data, name = content.get("data"), content.get("format")
    for key, value in (("data", data), ("format", name)):
        if value is None:
            raise request_errors.missing_parameter(f"{param}.{key}")
        if not isinstance(value, str):
            raise request_errors.invalid_type(f"{param}.{key}", "a string", value)
    if name not in _SOUND_NAMES:
        raise request_errors.invalid_value(f"{param}.format", f"expected one of {', '.join(_SOUND_NAMES)}")
    return f"data:audio/{name};base64,{data}"


def _vectors(param: str, part: Mapping[str, object]) -> MediaPart:
    name, content = f"{param}.image_embeds", part.get("image_embeds")
    if content is None:
        raise request_errors.missing_parameter(name)
    if not isinstance(content, str):
        raise request_errors.invalid_type(name, "a safetensors file in base64", content)
    return MediaPart("image", "", param=param, vectors=content)
