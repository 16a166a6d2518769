"""Base64 of a request: strict, except for white space, and decoded once."""

from __future__ import annotations

import binascii

from llmstack_media.decode.clips import join_frames, too_many_frames
from llmstack_media.errors import fetch_failed, image_too_large, invalid_image
from llmstack_media.limits import MAX_VIDEO_FRAMES
from llmstack_types import InvalidRequestError

_MAX_HEAD = 256
_WHITE_SPACE = b" \t\r\n\f\v"


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of `data:[type];base64,…`; of `video/jpeg`, those of pictures with commas between them.

    No other declared type is looked at.

    Raises:
        InvalidRequestError: It is not base64, or has more bytes.
    """
    head, comma, _ = url[:_MAX_HEAD].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise fetch_failed("A data: URL must have the form data:image/png;base64,…")
    text = url[len(head) + 1 :]
    if not head.lower().startswith("data:video/jpeg;"):
        return decode_base64(text, max_bytes)
    if text.count(",") >= MAX_VIDEO_FRAMES:
        raise too_many_frames(MAX_VIDEO_FRAMES)
    frames, left = [], max_bytes
    for part in text.split(","):
        frames.append(decode_base64(part, left))
        left -= len(frames[-1])
    return join_frames(frames)


def decoded_length(url: str) -> int:
    """The number of bytes that a `data:` URL may have at most."""
    return len(url) // 4 * 3


def decode_base64(text: str, max_bytes: int) -> bytes:
    """The bytes of a text in the standard alphabet, with padding; white space in it is ignored.

    Raises:
        InvalidRequestError: It has other characters or wrong padding, or more bytes.
    """
    try:
        encoded = text.encode("ascii").translate(None, _WHITE_SPACE)
        check_length(len(encoded) // 4 * 3 - 2, max_bytes)
        data = binascii.a2b_base64(encoded, strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise invalid_image("is not valid base64: it must have the standard alphabet and its padding") from error
    check_length(len(data), max_bytes)
    return data


def check_length(num_bytes: int, max_bytes: int) -> None:
    """Refuses media by its number of bytes.

    Raises:
        InvalidRequestError: There are too many.
    """
    if num_bytes > max_bytes:
        raise too_many_bytes(max_bytes)


def too_many_bytes(max_bytes: int) -> InvalidRequestError:
    """The refusal of media with more bytes than allowed."""
    return image_too_large(f"has more than the {max_bytes} bytes that are allowed")
