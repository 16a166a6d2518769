"""A bar on a terminal while something takes long; nothing anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from llmstack_types.log_lines import log_format_in_use

ItemT = TypeVar("ItemT")

# What ends sooner shows nothing: the eye cannot read a bar that flashes.
SHOWN_AFTER_S = 0.5
REDRAWN_AFTER_S = 0.1
_WIDTH = 30
_ERASE = "\r\x1b[2K"


def with_progress(
    title: str,
    items: Iterable[ItemT],
    total: int,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ItemT]:
    """The items, with a bar that shows how many of them have been taken.

    There is a bar on a terminal only, and only where the log is text. It disappears with the last item: what remains
    is the line of the log.

    `total`: Number of items; more or fewer of them change nothing but the bar.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty() or log_format_in_use() != "text":
        yield from items
        return
    next_s, is_shown = clock() + SHOWN_AFTER_S, False
    try:
        for number, item in enumerate(items):
            now_s = clock()
            if now_s >= next_s:
                stream.write(_ERASE + _line(title, number, total))
                stream.flush()
                next_s, is_shown = now_s + REDRAWN_AFTER_S, True
            yield item
    finally:
        if is_shown:
            stream.write(_ERASE)
            stream.flush()


def _line(title: str, number: int, total: int) -> str:
    share = min(1.0, number / total) if total > 0 else 1.0
    num_full = int(share * _WIDTH)
    return f"{title} {'█' * num_full}{'░' * (_WIDTH - num_full)} {share:4.0%}"
