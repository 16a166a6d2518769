"""Media in a prompt: what stands in for tokens, and the work of an encoder on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llmstack_types.vocabulary import MediaKind

DIGEST_BYTES: Final = 32
"""Size of the digest of an item."""
_NUM_HELD_ITEMS: Final = 16


def memory_name(digest: bytes) -> str:
    """The name of memory with an item's bytes, by which a reader knows that it has opened this and no other."""
    return f"llmstack-media-{digest.hex()}"


@dataclass(frozen=True, slots=True)
class MediaMemory:
    """The bytes that an encoder reads: preprocessed pixels or sound, or vectors. Either a file or the bytes themselves.

    Attributes:
        num_bytes: Their number.
        path: A file of this machine that stays as it is while a request with it lives. Memory of a process, by its
            descriptor, has the name `memory_name`: once it is closed, its number becomes that of other memory.
        data: The bytes, where the reader may be on another machine or they are few.
    """

    num_bytes: int
    path: str = ""
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture, sound or video of a prompt, or a run of vectors that stand there in place of tokens.

    Attributes:
        digest: 32 bytes that name its vectors: of its kind, of what made it from which bytes, and of all options.
        kind: What it is.
        offset: Its first place among the prompt's tokens.
        num_tokens: The places that it has there, row breaks and the like included.
        embed_runs: Those of them that vectors replace, (start, length) from `offset` on, ascending; empty for all.
        layout: Numbers that positions and the encoder need, such as the grid (frames, rows, columns) of patches.
        num_units: The cost of one layer of its encoder, in patches or frames; 0 for vectors, which are not encoded.
        memory: What its encoder reads; None in a request that was read from a step log.
    """

    digest: bytes
    kind: MediaKind
    offset: int
    num_tokens: int
    embed_runs: tuple[tuple[int, int], ...] = ()
    layout: tuple[int, ...] = ()
    num_units: int = 0
    memory: MediaMemory | None = None

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.offset + self.num_tokens

    @property
    def num_vectors(self) -> int:
        """The vectors that its encoder makes."""
        return sum(length for _, length in self.embed_runs) if self.embed_runs else self.num_tokens


class PrefixMedia(NamedTuple):
    """The items of a prompt whose prefix is looked for, or imported.

    Attributes:
        cache_salt: That of the request: what keeps equal items of others apart.
        items: In the order of the prompt, without their memory.
    """

    cache_salt: str = ""
    items: tuple[MediaItem, ...] = ()


NO_MEDIA: Final = PrefixMedia()
"""A prompt of tokens alone."""


def num_slices(num_units: int, slice_units: int) -> int:
    """Parts of each layer over so many units, where `slice_units` of them are one; 0 is for whole layers."""
    return max(1, -(-num_units // slice_units)) if slice_units else 1


class EncoderWork(NamedTuple):
    """A part of encoding one item in a step, before any row of the step.

    A layer that is computed in slices counts as so many layers here.

    Attributes:
        media_id: The item's number, under which the runner keeps its vectors.
        first_layer: The encoder's first layer to run.
        num_layers: Layers to run; vectors exist once all have run. 0 for an item of vectors.
        item: The item, with the first part; None with later ones.
    """

    media_id: int
    first_layer: int
    num_layers: int
    item: MediaItem | None = None


@dataclass(frozen=True, slots=True)
class MediaSpec:
    """The items that a loaded model takes besides tokens, and the cost of its encoder.

    Attributes:
        vector_size: Width of the vectors that stand in for tokens.
        num_layers: Layers of the encoder of each kind that the model takes; 0 for `embeds`.
        is_atomic: Tokens of one item attend to each other, so that a step computes all of them or none.
        max_num_tokens: The largest item of each kind, in tokens.
        has_cross_attention: Every token of a prompt attends to its one item, until the request ends. The item has the
            first token as its place, which is embedded as all others, and one vector for each of its units. It has
            room for the largest item's, whatever its length.
        alignment_size: Numbers of each token under the pooling task `alignment`; 0 where that is not possible.
        slice_units: Units of a slice: a layer over more of them is computed in several, which count as layers each. 0
            is for layers that are computed whole.
        step_units: Units that pass the whole encoder in about the time of a step with few rows; 0 if that is unknown.
    """

    vector_size: int
    num_layers: Mapping[MediaKind, int]
    is_atomic: bool = False
    max_num_tokens: Mapping[MediaKind, int] = field(default_factory=dict)
    has_cross_attention: bool = False
    alignment_size: int = 0
    slice_units: int = 0
    step_units: int = 0

    def num_layers_of(self, item: MediaItem) -> int:
        """The layers of an item's encoder, its slices counted."""
        return self.num_layers[item.kind] * num_slices(item.num_units, self.slice_units)

    def num_vectors(self, item: MediaItem) -> int:
        """The vectors that there has to be room for, of an item that the model takes."""
        return self.max_num_tokens[item.kind] if self.has_cross_attention else item.num_vectors

    def num_cache_tokens(self, asked: int, max_num_batched_tokens: int) -> int:
        """Vectors that the encoder cache has room for: those `asked` for.

        0 is a step's or the largest item's; with cross attention, where requests hold theirs to the end, that of
        several.
        """
        largest = max(self.max_num_tokens.values())
        if self.has_cross_attention:
            return asked or _NUM_HELD_ITEMS * largest
        return asked or max(max_num_batched_tokens, largest)


class EncoderStats(NamedTuple):
    """The encoder's part of a scheduler's state; counters grow from the engine's start.

    Attributes:
        num_cache_tokens: Vectors that the encoder cache has room for.
        num_used_tokens: Vectors in it.
        num_queries: Counter of items that were needed by a request, each once.
        num_hits: Counter of those whose vectors existed.
        num_encoded: Counter of items that were encoded to the end.
        num_units: Counter of the units of items that began to be encoded.
        num_evictions: Counter of items that were evicted.
        num_repeats: Counter of those that a request in progress still needed, so that they are encoded again.
        num_parts: Counter of parts of items that were encoded; it grows while an item is under way.
    """

    num_cache_tokens: int = 0
    num_used_tokens: int = 0
    num_queries: int = 0
    num_hits: int = 0
    num_encoded: int = 0
    num_units: int = 0
    num_evictions: int = 0
    num_repeats: int = 0
    num_parts: int = 0
