"""Shapes, costs and placeholders that follow from the size of a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of the text that stands in a prompt for a picture.

    Attributes:
        text: Plain text and special tokens, to be tokenized; where there are vectors, one special token.
        num_vectors: How many of this token follow one another, each replaced by a vector of the encoder. 0: text alone.
    """

    text: str
    num_vectors: int = 0


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How a model sees a picture of a certain size.

    Attributes:
        shape: Of the uint8 array that `prepare` makes.
        grid: Numbers for positions and the encoder, as `MediaItem.layout`; each processor says which.
        num_units: Patches before merging: the cost of one layer of the encoder.
        num_vectors: Vectors of the encoder, which replace as many tokens.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    num_units: int
    num_vectors: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        num_bytes = 1
        for length in self.shape:
            num_bytes *= length
        return num_bytes


@dataclass(frozen=True, slots=True)
class VideoLayout(ImageLayout):
    """How a model sees a video.

    Attributes:
        frames: Numbers of the frames that are taken, ascending.
        seconds: When the frames of each patch are shown, on average.
    """

    frames: tuple[int, ...]
    seconds: tuple[float, ...]


def text_of(pieces: tuple[Piece, ...]) -> str:
    """The whole text of the pieces, as the reference writes it into a prompt."""
    return "".join(piece.text * max(1, piece.num_vectors) for piece in pieces)
