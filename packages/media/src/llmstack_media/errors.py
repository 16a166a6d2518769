"""Refusals of media, one function for each code of the error contract."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from llmstack_types import InvalidRequestError, ServerOverloadedError
from llmstack_types.vocabulary import MediaKind

FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
SOUND_FORMATS = "WAV, MP3, FLAC, Ogg, WebM, Matroska, MP4, M4A, AAC or MPEG"


_SOUND_CODES = {"invalid_image": "invalid_audio", "image_too_large": "invalid_audio"}
"""What is wrong with the bytes of any item, where they are a sound's. How long it is has a code of its own."""


class ProcessorConfigError(ValueError):
    """The files of a checkpoint describe preprocessing that is not supported; the text says what in one sentence."""


def invalid_image(reason: str, param: str | None = None) -> InvalidRequestError:
    """A picture that cannot be read. `reason` follows "This image"."""
    return InvalidRequestError(f"This image {reason}.", param=param, code="invalid_image")


def unsupported_format(param: str | None = None) -> InvalidRequestError:
    """Bytes that are no picture of an allowed format."""
    message = f"This is not an image of an allowed format: {FORMATS}."
    return InvalidRequestError(message, param=param, code="unsupported_media_format")


def unsupported_video(param: str | None = None) -> InvalidRequestError:
    """Bytes that are no video of an allowed format."""
    message = (
        "This is not a video of an allowed format: MP4, WebM, Matroska, animated GIF or WebP, or a list of pictures."
    )
    return InvalidRequestError(message, param=param, code="unsupported_media_format")


def video_decoder_missing(param: str | None = None) -> InvalidRequestError:
    """A video in a container, where nothing is installed that decodes it."""
    message = "This server reads animated pictures alone; MP4 and WebM need llmstack-media[av], which is not installed."
    return InvalidRequestError(message, param=param, code="unsupported_media_format")


def image_too_large(reason: str, param: str | None = None) -> InvalidRequestError:
    """A picture over a limit. `reason` follows "This image"."""
    return InvalidRequestError(f"This image {reason}.", param=param, code="image_too_large")


def too_many_vectors(count: int, most: int, or_else: str = "") -> InvalidRequestError:
    """A video that becomes more tokens than the model takes. `or_else`: What becomes fewer, beside fewer frames."""
    reason = f"becomes {count} tokens, and may become {most}: fewer frames (num_frames, fps){or_else} become fewer"
    return image_too_large(reason)


def invalid_audio(reason: str, param: str | None = None) -> InvalidRequestError:
    """Sound that cannot be used. `reason` follows "This audio"."""
    return InvalidRequestError(f"This audio {reason}.", param=param, code="invalid_audio")


def unsupported_sound_format(param: str | None = None) -> InvalidRequestError:
    """Bytes that are no sound of an allowed format."""
    message = f"This is not audio of an allowed format: {SOUND_FORMATS}."
    return InvalidRequestError(message, param=param, code="unsupported_media_format")


def sound_decoder_missing(param: str | None = None) -> InvalidRequestError:
    """Compressed sound, where nothing is installed that decodes it."""
    message = "This server reads WAV files alone; other formats need llmstack-media[av], which is not installed."
    return InvalidRequestError(message, param=param, code="unsupported_media_format")


def audio_too_short(reason: str, param: str | None = None) -> InvalidRequestError:
    """Sound in which nothing can be said. `reason` follows "This audio"."""
    return InvalidRequestError(f"This audio {reason}.", param=param, code="audio_too_short")


def audio_too_long(reason: str, param: str | None = None) -> InvalidRequestError:
    """Sound over a limit of time. `reason` follows "This audio"."""
    return InvalidRequestError(f"This audio {reason}.", param=param, code="audio_too_long")


def no_room() -> ServerOverloadedError:
    """The disk is full, or other requests have what is free for audio."""
    return ServerOverloadedError("there is no room on the disk for audio", reason="media")


def url_not_allowed(reason: str, param: str | None = None) -> InvalidRequestError:
    """An address that is not fetched. `reason` follows "This URL"; it never repeats the URL."""
    return InvalidRequestError(f"This URL {reason}.", param=param, code="media_url_not_allowed")


def fetch_failed(reason: str, param: str | None = None) -> InvalidRequestError:
    """An address that gave nothing usable. `reason` is a whole sentence without its end; it never repeats content."""
    return InvalidRequestError(f"{reason}.", param=param, code="media_fetch_failed")


def media_not_found(param: str | None = None) -> InvalidRequestError:
    """A `uuid` without content that is not known for this key, or not any more."""
    message = "No media is kept under this uuid; send its content with it."
    return InvalidRequestError(message, param=param, code="media_not_found")


def unknown_option(name: str, known: list[str], param: str | None = None) -> InvalidRequestError:
    """An option of a request that its model's processor does not have."""
    message = f"The processor of this model has no option '{name[:64]}'; it has {', '.join(known) or 'none'}."
    return InvalidRequestError(message, param=param, code="invalid_value")


def invalid_option(name: str, allowed: str, param: str | None = None) -> InvalidRequestError:
    """A value that an option cannot have. `allowed` follows "must be"."""
    return InvalidRequestError(f"'{name[:64]}' must be {allowed}.", param=param, code="invalid_value")


@contextlib.contextmanager
def named_refusals(param: str, kind: MediaKind = "image") -> Iterator[None]:
    """Refusals of what is inside name this part of the request, and what kind of item it is."""
    try:
        yield
    except InvalidRequestError as error:
        message = error.message.replace("This image ", f"This {kind} ", 1)
        code = _SOUND_CODES.get(error.code or "", error.code) if kind == "audio" else error.code
        raise InvalidRequestError(message, param=param or error.param, code=code) from error


@contextlib.contextmanager
def counted_refusals(codes: Counter[str]) -> Iterator[None]:
    """Counts refusals inside of the block by their code."""
    try:
        yield
    except InvalidRequestError as error:
        codes[error.code or ""] += 1
        raise
