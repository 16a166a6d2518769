"""Blocks of pictures, as the media that prompts take."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmstack_llm import request_errors
from llmstack_llm.media.parts import MediaPart
from llmstack_server.chat.turns import required_text
from llmstack_server.web.errors import missing_parameter

_MEDIA_TYPE = re.compile(r"image/[a-zA-Z0-9.+-]{1,64}")


def read_image(param: str, block: Mapping[str, object]) -> MediaPart:
    """The picture of a block; what it holds is looked at later.

    Raises:
        InvalidRequestError: Its source is malformed, or is none of `base64`, `url` and `file`; the field is named.
    """
    place, source = f"{param}.source", block.get("source")
    if source is None:
        raise missing_parameter(place)
    if not isinstance(source, dict):
        raise request_errors.invalid_type(place, "an object", source)
    kind = required_text(place, source, "type")
    if kind == "file":
        file_id = required_text(place, source, "file_id")
        if not file_id:
            raise request_errors.invalid_value(f"{place}.file_id", "it is empty")
        return MediaPart("image", "", param=param, file_id=file_id)
    if kind == "url":
        url = required_text(place, source, "url")
    elif kind == "base64":
        media_type = required_text(place, source, "media_type")
        if not _MEDIA_TYPE.fullmatch(media_type):
            raise request_errors.invalid_value(f"{place}.media_type", "expected one such as 'image/png'")
        url = f"data:{media_type};base64,{required_text(place, source, 'data')}"
    else:
        reason = "the source of a picture may be 'base64', 'url' or 'file'"
        raise request_errors.unsupported_parameter(f"{place}.type", reason)
    if not url:
        raise request_errors.invalid_value(f"{place}.url", "it is empty")
    return MediaPart("image", url, param=param)
