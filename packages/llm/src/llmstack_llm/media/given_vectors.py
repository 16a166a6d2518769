"""Vectors that a request gives in place of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_types import MediaItem, MediaMemory


class GivenVectors:
    """An `OpenedMedia`, and the `PreparedMedia` that it becomes."""

    def __init__(self, pieces: Sequence[tuple[str, int]], digest: bytes, data: bytes) -> None:
        """`pieces`: What stands in the prompt. `data`: The vectors, in the model's type."""
        self.pieces = pieces
        self._digest = digest
        self._data = data

    async def prepare(self) -> GivenVectors:
        """Itself: there is nothing to do."""
        return self

    def item(self, offset: int, num_tokens: int, embed_runs: tuple[tuple[int, int], ...] = ()) -> MediaItem:
        """The item at its place in the prompt."""
        memory = MediaMemory(len(self._data), data=self._data)
        return MediaItem(self._digest, "embeds", offset, num_tokens, embed_runs, memory=memory)

    def release(self) -> None:
        """Nothing is held besides the request itself."""

    def close(self) -> None:
        """Forgets nothing: no file was fetched for it."""
