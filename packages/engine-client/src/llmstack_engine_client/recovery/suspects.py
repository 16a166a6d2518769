"""Search for the request that crashes engine cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MAX_NUM_LONE_CRASHES = 2
# More of them in a row, without progress of any request between them, count like crashes: one may need too much memory.
_MAX_UNBLAMED_ENDS = 2
NUM_CLEARING_TOKENS = 8
"""After so many tokens a request is beyond suspicion. One token might be that of a step before the deadly one: the last
words of an engine core can get lost, so its requests go on from a few steps earlier."""


@dataclass(frozen=True, slots=True)
class AfterCrash:
    """Which requests go on, wait or end after a crash of their engine core.

    Attributes:
        resumed: The requests that are resumed at once.
        quarantined: The request that ends with an error: engine cores crashed with it alone, one after the other.
        is_search: Whether the crash narrows a search: the crashed engine core had requests of an earlier crash.
        num_lone_crashes: How many engine cores have crashed with the first resumed request alone.
    """

    resumed: Sequence[str]
    quarantined: str | None = None
    is_search: bool = False
    num_lone_crashes: int = 0


class Suspects:
    """The requests that may have crashed an engine core: a pure function of crashes and tokens, which knows ids only.

    After one crash all requests are resumed. A request with some tokens since is no suspect any more: the first steps
    after a restart compute what the crashed engine core computed last. After another crash with suspects, half of them
    are resumed and all others wait. So the request is found within two crashes more than log2 of their number. The
    others are delayed, but lose nothing.

    An engine core that is ended from outside, such as by an operator, says nothing of its requests. Only where that
    happens again and again before any request has made progress does it count as a crash.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        """`is_shared`: Whether the engine core may have requests of other clients, so one crash more is needed."""
        self._max_num_lone_crashes = _MAX_NUM_LONE_CRASHES + is_shared
        self._num_unblamed_ends = 0
        self._is_blameless = False  # whether those in test are that for an end from outside
        self._in_test: dict[str, int] = {}  # to the tokens that are missing
        self._held: deque[list[str]] = deque()
        self._newcomers: list[str] = []
        self._num_lone_crashes: dict[str, int] = {}

    @property
    def has_any(self) -> bool:
        """Whether any request is in test, held back or new."""
        return bool(self._in_test or self._held or self._newcomers)

    @property
    def is_searching(self) -> bool:
        """Whether some are held back: newcomers have to wait too, or they would blur what a death says."""
        return bool(self._held)

    def suspect(self, request_id: str) -> None:
        """Notes a request that was in an engine core when that died, and goes on in this one."""
        self._in_test[request_id] = NUM_CLEARING_TOKENS
        self._is_blameless = False

    def hold(self, request_id: str) -> None:
        """Holds a newcomer until all suspects have been let go."""
        self._newcomers.append(request_id)

    def release_newcomers(self) -> list[str]:
        """The requests that have been held back."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def on_crash(self, running: Sequence[str], unsent: Sequence[str] = (), *, is_outside: bool = False) -> AfterCrash:
        """The engine core died with these in it, in the order of their arrival.

        `unsent`: Requests that were let go, but which it has not received: the crash says nothing of them.
        `is_outside`: It was ended from outside.
        """
        if not running or (is_outside and self._is_unblamed(running)):
            return AfterCrash([*running, *unsent], is_search=self.is_searching)
        is_first = self._is_blameless and not is_outside
        self._num_unblamed_ends *= is_outside
        self._is_blameless = False
        suspects = [] if is_first else [request_id for request_id in running if request_id in self._in_test]
        if not suspects and not self.is_searching:
            self._test(running)
            return AfterCrash([*running, *unsent])
        if unsent:
            self._held.appendleft(list(unsent))
        if not suspects:
            self._test(running)
            return AfterCrash(running, is_search=True)
        if len(running) == 1:
            return self._on_lone_crash(running[0])
        cleared = [request_id for request_id in running if request_id not in self._in_test]
        middle = (len(suspects) + 1) // 2
        tested, others = suspects[:middle], suspects[middle:]
        self._held = deque(group for group in (others, *self._held, cleared) if group)
        self._test(tested)
        return AfterCrash(tested, is_search=True)

    def on_tokens(self, request_id: str, num_tokens: int) -> list[str]:
        """Notes tokens of a request; returns the requests that may now be resumed too."""
        if request_id not in self._in_test:
            return []
        self._in_test[request_id] -= num_tokens
        return [] if self._in_test[request_id] > 0 else self._clear([request_id])

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """These have ended; returns those that may now go on too."""
        gone = set(request_ids)
        self._newcomers = [one for one in self._newcomers if one not in gone]
        groups = ([one for one in group if one not in gone] for group in self._held)
        self._held = deque(group for group in groups if group)
        return self._clear(gone)

    def _test(self, request_ids: Iterable[str]) -> None:
        self._in_test = dict.fromkeys(request_ids, NUM_CLEARING_TOKENS)

    def _clear(self, request_ids: Iterable[str]) -> list[str]:
        for request_id in request_ids:
            if self._in_test.pop(request_id, None) is not None:
                self._num_unblamed_ends = 0
            self._num_lone_crashes.pop(request_id, None)
        return [] if self._in_test else self._release()

    def _on_lone_crash(self, request_id: str) -> AfterCrash:
        num_crashes = self._num_lone_crashes.get(request_id, 0) + 1
        if num_crashes < self._max_num_lone_crashes:
            self._num_lone_crashes[request_id] = num_crashes
            self._test([request_id])
            return AfterCrash([request_id], is_search=True, num_lone_crashes=num_crashes)
        del self._num_lone_crashes[request_id]
        self._in_test.clear()
        return AfterCrash(self._release(), request_id, is_search=True)

    def _is_unblamed(self, running: Sequence[str]) -> bool:
        """Notes an end from outside; whether it says nothing yet."""
        self._num_unblamed_ends += 1
        if self._num_unblamed_ends > _MAX_UNBLAMED_ENDS:
            return False
        if self._is_blameless or not self._in_test:
            self._test(running)
            self._is_blameless = True
        return True

    def _release(self) -> list[str]:
        """The next group, which is in test now; after the last one, those who came meanwhile."""
        if not self._held:
            return self.release_newcomers()
        group = self._held.popleft()
        self._test(group)
        return group
