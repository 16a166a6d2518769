"""Free segments by what is known of their pauses, and the one that is wanted last."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping

from llmstack_kv_cache.pauses import PauseClass
from llmstack_kv_cache.session_turns import Pause, Segment

_Key = tuple[str, PauseClass, int]
_Rank = tuple[float, float, int, _Key, Pause]
"""What is evicted first is the least: its worth, since when it pauses, its number, its group."""


class PauseGroups:
    """Pauses with free segments, in groups of one salt, class and stage, which are worth the same.

    The first of each group is in a heap, until what is known of the groups changes: O(groups) then, and
    O(log groups) for each further segment that is evicted.
    """

    def __init__(self, worth: Callable[[str, PauseClass, int], float]) -> None:
        """`worth`: Of a group."""
        self._worth = worth
        self._groups: dict[_Key, OrderedDict[Pause, Segment]] = {}
        self._ranks: list[_Rank] | None = None

    def change(self) -> None:
        """Groups are worth something else from now on."""
        self._ranks = None

    def enter(self, pause: Pause) -> None:
        """A pause has come to its group, if it has a segment."""
        if pause.segment is None:
            return
        key = pause.salt, pause.pause_class, pause.stage
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = OrderedDict()
            if self._ranks is not None and len(self._ranks) < 2 * len(self._groups) + 64:
                heapq.heappush(self._ranks, self._rank(key, pause))
            else:
                self._ranks = None
        group[pause] = pause.segment

    def exit(self, pause: Pause) -> None:
        """Takes a pause out of its group, if it is in one."""
        key = pause.salt, pause.pause_class, pause.stage
        group = self._groups.get(key)
        if group is not None and pause in group:
            del group[pause]
            if not group:
                del self._groups[key]

    def least(self) -> Segment:
        """The segment of which the least is expected, after the longest pause first. There must be one."""
        if self._ranks is None:
            self._ranks = [self._rank(key, next(iter(group))) for key, group in self._groups.items()]
            heapq.heapify(self._ranks)
        while True:
            _, _, number, key, pause = self._ranks[0]
            group: Mapping[Pause, Segment] = self._groups.get(key, {})
            first = next(iter(group), None)
            if first is pause and number == pause.number:
                return group[pause]
            heapq.heappop(self._ranks)
            if first is not None:
                heapq.heappush(self._ranks, self._rank(key, first))

    def _rank(self, key: _Key, pause: Pause) -> _Rank:
        return self._worth(*key), pause.began_s, pause.number, key, pause
