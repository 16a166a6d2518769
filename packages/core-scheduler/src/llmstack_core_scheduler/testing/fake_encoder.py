"""An encoder whose vectors are digests, so that wrong ones give wrong tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

from llmstack_core_scheduler.media_numbers import Numbered, vector_places
from llmstack_types import EncoderWork, MediaItem, MediaSpec, ScheduledRequest, SchedulerOutput


class WrongMediaError(Exception):
    """The encoder was asked for what does not follow, or a row would have read vectors that are not its item's."""


def seen_ids(token_ids: Sequence[int], media: Iterable[MediaItem]) -> list[int]:
    """The input of the fake model: ids of the prompt, and numbers of the vectors in place of some."""
    seen = list(token_ids)
    for item in media:
        vectors = (place for places in vector_places(item) for place in places)
        for index, place in enumerate(vectors):
            packed = blake2b(item.digest + index.to_bytes(4, "little"), digest_size=7).digest()
            seen[place] = int.from_bytes(packed, "little")
    return seen


class FakeEncoder:
    """The items that a runner has, and the layers that have run of each.

    Attributes:
        num_tokens: Vectors of all of them.
        most_tokens: The most that there ever were after a step.
        num_parts: Counter of parts of items.
    """

    def __init__(self, spec: MediaSpec, broken: Collection[bytes] = ()) -> None:
        """`broken`: Digests of items that have no vectors: rows that read them fail."""
        self.num_tokens = self.most_tokens = self.num_parts = 0
        self._spec = spec
        self._broken = broken
        self._items: dict[int, tuple[MediaItem, int]] = {}

    @property
    def num_begun(self) -> int:
        """Items that are not complete."""
        return sum(num_done < self._spec.num_layers_of(item) for item, num_done in self._items.values())

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Drops and encodes what a step says.

        Raises:
            WrongMediaError: It does not follow from what was done before.
        """
        for number in scheduled.freed_media:
            if number not in self._items:
                raise WrongMediaError(f"item {number} is freed and does not exist")
            self.num_tokens -= self._spec.num_vectors(self._items.pop(number)[0])
        for work in scheduled.encoder_work:
            self._encode(work)
        if self.num_begun > 1:
            raise WrongMediaError(f"{self.num_begun} items are begun")
        self.most_tokens = max(self.most_tokens, self.num_tokens)

    def fails(self, row: ScheduledRequest, media: Numbered) -> bool:
        """Whether a row reads an item that has no vectors.

        Raises:
            WrongMediaError: It reads one that is not complete, or not the one of its prompt.
        """
        start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        has_failed = False
        for number, item in media:
            is_read = any(places.start < end and places.stop > start for places in vector_places(item))
            if not is_read and not self._spec.has_cross_attention:
                continue
            encoded, num_done = self._items.get(number, (None, 0))
            if encoded is None or num_done < self._spec.num_layers_of(item):
                raise WrongMediaError(f"{row.request_id} reads item {number}, of which {num_done} layers have run")
            if encoded.digest != item.digest:
                raise WrongMediaError(f"{row.request_id} reads another item than its own as number {number}")
            has_failed |= item.digest in self._broken
        return has_failed

    def _encode(self, work: EncoderWork) -> None:
        item, num_done = self._items.get(work.media_id, (work.item, 0))
        if item is None or work.first_layer != num_done or (work.item is None) != (num_done > 0):
            raise WrongMediaError(f"layer {work.first_layer} of item {work.media_id} follows {num_done}")
        num_layers = self._spec.num_layers_of(item)
        if work.num_layers < min(num_layers, 1) or num_done + work.num_layers > num_layers:
            raise WrongMediaError(f"{work.num_layers} layers of item {work.media_id} run after {num_done}")
        if work.media_id not in self._items:
            self.num_tokens += self._spec.num_vectors(item)
        elif not num_layers:
            raise WrongMediaError(f"item {work.media_id} has its vectors already")
        self._items[work.media_id] = item, num_done + work.num_layers
        self.num_parts += 1
