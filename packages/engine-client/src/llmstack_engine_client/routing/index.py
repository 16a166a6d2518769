"""The routing index: which replica has which segments of prompts cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_kv_cache.segments import unpack_keys

# An entry takes 76 bytes, 112 where several replicas have it, so that the index stays below 64 MiB.
MAX_SEGMENTS: Final = 524_288
# Segments that prompts under way will probably leave.
MAX_EXPECTED_SEGMENTS: Final = 65_536
MAX_SETTLING_PROMPTS: Final = 256

_Prompt = tuple[int, Sequence[int]]


class RoutingIndex:
    """Maps the key of a segment to the replicas that have it, as the bits of a number.

    Each replica may have its share of `MAX_SEGMENTS`; what comes above it is not noted. A prompt that was sent to a
    replica is expected there until the replica has reported twice after its end.

    Attributes:
        num_left_out: Counter of segments above a replica's share.
        num_gaps: Counter of missing updates, each of which cleared the part of its replica.
    """

    def __init__(self, num_replicas: int, max_segments: int = MAX_SEGMENTS) -> None:
        self.num_left_out = 0
        self.num_gaps = 0
        self._max_per_replica = max_segments // num_replicas
        self._max_expected = min(MAX_EXPECTED_SEGMENTS, max_segments) // num_replicas
        self._key_to_replicas: dict[int, int] = {}
        self._bits = [1 << replica for replica in range(num_replicas)]
        self._num_segments = [0] * num_replicas
        # By replica: key to the number of the last prompt under way that will leave it, the oldest first.
        self._expected: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        self._key_to_expecting: dict[int, int] = {}
        self._num_prompts = 0
        # By replica: prompts that ended before its last update, and since it.
        self._settling: list[tuple[list[_Prompt], list[_Prompt]]] = [([], []) for _ in range(num_replicas)]
        self._numbers: list[int | None] = [None] * num_replicas

    def __len__(self) -> int:
        return len(self._key_to_replicas)

    def find(self, keys: Sequence[int]) -> list[int]:
        """The number of leading segments that each replica has."""
        found = [0] * len(self._num_segments)
        left = (1 << len(found)) - 1
        for number, key in enumerate(keys):
            still = left & (self._key_to_replicas.get(key, 0) | self._key_to_expecting.get(key, 0))
            gone = left ^ still
            while gone:
                lowest = gone & -gone
                found[lowest.bit_length() - 1] = number
                gone ^= lowest
            left = still
            if not left:
                return found
        while left:
            lowest = left & -left
            found[lowest.bit_length() - 1] = len(keys)
            left ^= lowest
        return found

    def expect(self, replica: int, keys: Sequence[int]) -> int:
        """Notes segments that a prompt under way will leave, also where they are cached now; a number for `settle`.

        Above a limit the oldest ones are forgotten: where so much waits, they are evicted before the prompt runs.
        """
        if self._numbers[replica] is None:  # it reports nothing: what is expected there would stay for ever
            return 0
        self._num_prompts += 1
        expected, bit = self._expected[replica], self._bits[replica]
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            if expected.pop(key, None) is None:
                self._key_to_expecting[key] = self._key_to_expecting.get(key, 0) | bit
            expected[key] = self._num_prompts
        while len(expected) > self._max_expected:
            self._forget_expected(replica, next(iter(expected)))
        return self._num_prompts

    def settle(self, replica: int, number: int, keys: Sequence[int]) -> None:
        """A prompt that `expect` returned the number for has ended: soon its keys are cached, or will never be."""
        if number:
            since = self._settling[replica][1]
            since.append((number, keys))
            if len(since) >= MAX_SETTLING_PROMPTS:  # a replica that finds everything has nothing to report
                self._settle_before(replica)

    def apply(self, replica: int, update: CacheUpdate) -> bool:
        """Takes an update of a replica; False where one before it is missing, which clears the replica's part."""
        number, self._numbers[replica] = self._numbers[replica], update.number
        if update.is_whole:
            self.clear(replica)
            self._numbers[replica] = update.number
        elif number is None or update.number != number + 1:
            self.clear(replica)
            self.num_gaps += 1
            return False
        for key in unpack_keys(update.removed):
            self._remove(replica, key)
        for key in unpack_keys(update.added):
            self._add(replica, key)
        self._settle_before(replica)
        return True

    def clear(self, replica: int) -> None:
        """Forgets a replica's part, what is expected there included. O(all segments)."""
        self._numbers[replica] = None
        for key in list(self._expected[replica]):
            self._forget_expected(replica, key)
        self._settling[replica] = [], []
        if self._num_segments[replica]:
            bit = self._bits[replica]
            for key in [key for key, replicas in self._key_to_replicas.items() if replicas & bit]:
                self._remove(replica, key)

    def _settle_before(self, replica: int) -> None:
        expected, (before, since) = self._expected[replica], self._settling[replica]
        for prompt, keys in before:
            for key in keys:
                if expected.get(key) == prompt:
                    self._forget_expected(replica, key)
        self._settling[replica] = since, []

    def _forget_expected(self, replica: int, key: int) -> None:
        del self._expected[replica][key]
        left = self._key_to_expecting[key] ^ self._bits[replica]
        if left:
            self._key_to_expecting[key] = left
        else:
            del self._key_to_expecting[key]

    def _add(self, replica: int, key: int) -> None:
        bit, replicas = self._bits[replica], self._key_to_replicas.get(key, 0)
        if replicas & bit:
            return
        if self._num_segments[replica] >= self._max_per_replica:
            self.num_left_out += 1
            return
        self._key_to_replicas[key] = replicas | bit if replicas else bit  # one object for all that one replica has
        self._num_segments[replica] += 1

    def _remove(self, replica: int, key: int) -> None:
        bit, replicas = self._bits[replica], self._key_to_replicas.get(key, 0)
        if not replicas & bit:
            return
        self._num_segments[replica] -= 1
        if replicas ^ bit:
            self._key_to_replicas[key] = replicas ^ bit
        else:
            del self._key_to_replicas[key]
