"""Long messages of clients, which are decoded beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, ClientMessage

LONG_BYTES: Final = 2**17
"""Of a frame that a thread decodes: a prompt of 32,768 tokens, which takes a millisecond."""

MAX_HELD_BYTES: Final = 2**25
"""Of the frames that wait; a decoded prompt is ten times as large."""

Decoded = Callable[[], ClientMessage]
"""Returns a message, or raises `CodecError`."""


class LongFrames:
    """Has a thread decode long messages while steps are computed, so that no step waits for it.

    What a client sends behind one waits with it, so that its messages keep their order. Others overtake them.

    Attributes:
        is_waiting: Whether there are messages that have not been taken.
        is_full: Whether nothing more should be read.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "decode")
        self._held: dict[bytes, deque[tuple[Sequence[bytes], Future[ClientMessage] | None]]] = {}
        self._num_bytes = 0
        self.is_waiting = self.is_full = False  # attributes, since each step asks for them

    def holds(self, client: bytes) -> bool:
        """Whether a message of the client has not been taken."""
        return client in self._held

    def hold(self, client: bytes, frames: Sequence[bytes], *, is_busy: bool) -> bool:
        """Takes a message that waits from now on; False for one that is to be decoded at once.

        `is_busy`: There are steps to compute.
        """
        held, num_bytes = self._held.get(client), sum(map(len, frames))
        is_long = num_bytes > LONG_BYTES
        if held is None:
            if not (is_long and is_busy):
                return False
            held = self._held[client] = deque()
        held.append((frames, self._thread.submit(decode, frames) if is_long else None))
        self._num_bytes += num_bytes
        self.is_waiting, self.is_full = True, self._num_bytes > MAX_HELD_BYTES
        return True

    def take(self) -> Iterator[tuple[bytes, Decoded]]:
        """The messages that wait no longer, with their clients; at most one long message of each."""
        for client, held in list(self._held.items()):
            is_long = False
            while held and not is_long:
                frames, decoding = held[0]
                if decoding is not None and not decoding.done():
                    break
                held.popleft()
                self._num_bytes -= sum(map(len, frames))
                self.is_full = self._num_bytes > MAX_HELD_BYTES
                is_long = decoding is not None
                yield client, partial(decode, frames) if decoding is None else decoding.result
            if not held:
                del self._held[client]
        self.is_waiting = bool(self._held)


def decode(frames: Sequence[bytes]) -> ClientMessage:
    """The message of some frames.

    Raises:
        CodecError: They are none.
    """
    if len(frames) != 1:
        raise CodecError(f"a message must have one frame, but has {len(frames)}")
    return CLIENT_MESSAGES.decode(frames[0])[1]
