"""Fair scheduling of work on long texts, in threads beside the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar, TypeVarTuple

from llmstack_llm.text.tokenizer import MAX_CHARS_ON_LOOP
from llmstack_types import ServerOverloadedError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ArgumentTs = TypeVarTuple("ArgumentTs")

MAX_SMALL_CHARS = 1 << 16
"""Longer texts are large: they wait for each other, and small ones do not wait for them. This many take about 30 ms."""
MAX_LARGE_CHARS = 1 << 20
"""Characters of large texts in work at once; a longer text runs without another large one."""
MAX_WAITING_CHARS = 1 << 26
"""Characters that wait in one lane; a text that finds no other waiting is never refused."""
MAX_WAITERS = 1024
MAX_LOOP_S = 0.25
"""A short text takes a hundredth of this. After one that takes longer, processor time is measured. After one that takes
so much of that, no text is tokenized on the event loop. A pause of a busy machine is no such text."""
MAX_FREE_HEAP_BYTES = 1 << 20
"""Free memory at the end of a thread's heap that stays there, once a large text has been worked on."""
_NO_THREAD = "can't start new thread"  # the words of CPython's RuntimeError
_M_TRIM_THRESHOLD = -1  # of <malloc.h>


class TextGate:
    """Runs functions on texts: short texts at once, longer ones in threads.

    Small and large texts have a lane each, with a bound on the characters in work. In a lane shorter texts overtake
    longer ones, but no text is overtaken by more characters than it has itself. After a large text, free memory goes
    back to the operating system. Of short texts one turn of the event loop has as many characters as one may have: a
    request may have a thousand of them. For one event loop.
    """

    def __init__(self) -> None:
        self._small, self._large = _Lane(MAX_SMALL_CHARS), _Lane(MAX_LARGE_CHARS)
        self._max_chars_on_loop = MAX_CHARS_ON_LOOP
        self._clock = time.monotonic  # that of the processor takes longer to read
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn_chars = 0  # of this turn of the loop
        self._turn_waiters = deque[tuple[int, asyncio.Future[None]]]()

    async def run(self, num_chars: int, function: Callable[[*ArgumentTs], ResultT], *arguments: *ArgumentTs) -> ResultT:
        """The function's result. A cancelled caller leaves the queue; work that has begun in a thread still counts.

        Raises:
            ServerOverloadedError: Too many texts are waiting.
        """
        if num_chars <= self._max_chars_on_loop:
            if num_chars:
                await self._take_turn(num_chars)
            clock = self._clock
            start_s = clock()
            try:
                return function(*arguments)
            finally:
                taken_s = clock() - start_s
                if taken_s > MAX_LOOP_S:  # the tokenizer's expressions may need many steps per character
                    self._note_slow(num_chars, taken_s, is_work=clock is not time.monotonic)
        is_small = num_chars <= MAX_SMALL_CHARS
        lane = self._small if is_small else self._large
        await lane.enter(num_chars)
        call: Callable[[], ResultT] = functools.partial(function, *arguments)
        working = asyncio.ensure_future(in_thread(call if is_small else functools.partial(_call_and_trim, call)))
        working.add_done_callback(lambda _: lane.leave(num_chars))
        return await asyncio.shield(working)

    @property
    def num_waiting(self) -> int:
        """Texts that wait for others."""
        return len(self._small.waiters) + len(self._large.waiters)

    def _note_slow(self, num_chars: int, taken_s: float, *, is_work: bool) -> None:
        """Sends all texts to threads, if the time was spent on the text; else the next ones are measured so."""
        self._clock = time.thread_time
        if is_work:
            self._max_chars_on_loop = 0
            logger.warning("a text of %d characters took %.2f s; all go to threads now", num_chars, taken_s)

    async def _take_turn(self, num_chars: int) -> None:
        """Waits for a turn of the event loop that has room for a short text; those that came before have it first."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # one that has ended has ended no turn
            self._loop, self._turn_chars = loop, 0
            self._turn_waiters.clear()
        if self._turn_waiters or (self._turn_chars and self._turn_chars + num_chars > MAX_CHARS_ON_LOOP):
            entry = loop.create_future()
            self._turn_waiters.append((num_chars, entry))
            await entry
            return
        if not self._turn_chars:
            loop.call_soon(self._end_turn)
        self._turn_chars += num_chars

    def _end_turn(self) -> None:
        """The next turn of the event loop is that of those that wait longest."""
        self._turn_chars = 0
        while self._turn_waiters:
            num_chars, entry = self._turn_waiters[0]
            if self._turn_chars and self._turn_chars + num_chars > MAX_CHARS_ON_LOOP:
                break
            self._turn_waiters.popleft()
            if not entry.cancelled():
                entry.set_result(None)
                self._turn_chars += num_chars
        if self._turn_chars and self._loop is not None:
            self._loop.call_soon(self._end_turn)


async def in_thread(function: Callable[[*ArgumentTs], ResultT], *arguments: *ArgumentTs) -> ResultT:
    """The function's result, computed in a thread beside the event loop.

    Raises:
        ServerOverloadedError: The process may start no more threads.
    """
    try:
        return await asyncio.to_thread(function, *arguments)
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        raise ServerOverloadedError("no further thread can be started", reason="tokenization") from error


def _call_and_trim(call: Callable[[], ResultT]) -> ResultT:
    """The call's result; glibc would keep the memory of the tokenizer's objects, up to 180 bytes per character."""
    trim = _malloc_trim()
    try:
        return call()
    finally:
        if trim is not None:
            trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc that gives free memory back; None with another C library.

    It leaves the end of a thread's heap to `free`, which keeps up to 64 MiB unless a threshold is set.
    """
    library = ctypes.CDLL(None)
    trim: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
    if trim is not None:
        library.mallopt(_M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)
    return trim


class _Waiter(NamedTuple):
    """A text in a lane's queue; the first in order is next."""

    rank: int
    number: int
    num_chars: int
    entry: asyncio.Future[None]


class _Lane:
    """A queue, and a bound on the characters in work at once; one text alone may have more."""

    def __init__(self, max_chars: int) -> None:
        self.waiters: list[_Waiter] = []
        self._max_chars = max_chars
        self._working_chars = 0
        self._waiting_chars = 0
        self._started_chars = 0
        self._numbers = itertools.count()

    async def enter(self, num_chars: int) -> None:
        """Waits until the text may be worked on; `leave` follows."""
        if not self.waiters and self._fits(num_chars):
            self._start(num_chars)
            return
        self._check_room(num_chars)
        entry = asyncio.get_running_loop().create_future()
        # The rank grows with what has been started meanwhile, so later texts overtake only for so long.
        waiter = _Waiter(self._started_chars + num_chars, next(self._numbers), num_chars, entry)
        heapq.heappush(self.waiters, waiter)
        self._waiting_chars += num_chars
        try:
            await entry
        except asyncio.CancelledError:
            if entry.done() and not entry.cancelled():  # it was its time at the same moment
                self.leave(num_chars)
            else:
                self._drop(waiter)
            raise

    def leave(self, num_chars: int) -> None:
        """Ends the work on a text and begins with what fits now."""
        self._working_chars -= num_chars
        self._start_waiters()

    def _check_room(self, num_chars: int) -> None:
        is_full = len(self.waiters) >= MAX_WAITERS
        if is_full or (self.waiters and self._waiting_chars + num_chars > MAX_WAITING_CHARS):
            raise ServerOverloadedError("too many long texts wait to be tokenized", reason="tokenization")

    def _drop(self, waiter: _Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)
            heapq.heapify(self.waiters)
            self._waiting_chars -= waiter.num_chars
            self._start_waiters()

    def _fits(self, num_chars: int) -> bool:
        return not self._working_chars or self._working_chars + num_chars <= self._max_chars

    def _start(self, num_chars: int) -> None:
        self._working_chars += num_chars
        self._started_chars += num_chars

    def _start_waiters(self) -> None:
        while self.waiters and self._fits(self.waiters[0].num_chars):
            waiter = heapq.heappop(self.waiters)
            self._waiting_chars -= waiter.num_chars
            if not waiter.entry.cancelled():  # its task has not run since
                self._start(waiter.num_chars)
                waiter.entry.set_result(None)
