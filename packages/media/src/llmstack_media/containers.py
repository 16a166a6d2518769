"""Containers of sound and video, opened by PyAV where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

from llmstack_types import InvalidRequestError

MP4: Final = "mov,mp4,m4a,3gp,3g2,mj2"
MATROSKA: Final = "matroska,webm"
MATROSKA_START: Final = b"\x1aE\xdf\xa3"


def has_av() -> bool:
    """Whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def ffmpeg_error() -> type[Exception]:
    """The exception that PyAV raises for a fault of a file; it has to be installed."""
    found: type[Exception] = importlib.import_module("av").error.FFmpegError
    return found


@contextlib.contextmanager
def opened_container(file: BinaryIO, demuxer: str, damaged: Callable[[str], InvalidRequestError]) -> Iterator[Any]:
    """A container of PyAV, which has to be installed.

    FFmpeg gets an open file, the one demuxer that its first bytes name, and no protocol: without that a text that
    names an address made it open a connection.

    Raises:
        InvalidRequestError: As `damaged` makes it, for a fault of the file here or inside of the block.
    """
    av: Any = importlib.import_module("av")
    options, name = {"format_whitelist": demuxer, "protocol_whitelist": "none"}, demuxer.partition(",")[0]
    try:
        with av.open(file, mode="r", format=name, options=options, metadata_errors="ignore") as found:
            yield found
    except InvalidRequestError:  # one of ours, which is a ValueError too
        raise
    except (ffmpeg_error(), ValueError, EOFError) as error:
        raise damaged("is damaged, or not of the format that it begins as") from error
